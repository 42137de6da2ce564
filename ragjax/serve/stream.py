"""Sending a response while the client listens, and stopping the work as soon as it does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ragjax import core
from ragjax.serve.error import ApiError, api_error
from ragjax.serve.response import Json, Numbered

T = TypeVar("T")


async def respond(work: Coroutine[Any, Any, Json], request: Request) -> JSONResponse:
    """Answers with what `work` returns, once it is complete.

    Raises:
        ClientDisconnect: if the client left first.
    """
    return JSONResponse(await _while_connected(work, request.receive))


async def _while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Returns what `work` returns; it is cancelled, and its clean-up awaited, as soon as the client leaves.

    Raises:
        ClientDisconnect: if the client left first.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events of JSON chunks, then `[DONE]`.

    The response begins with the first chunk, so an error before it becomes an HTTP error; a later one becomes the event
    that ends the stream: what `failed` makes of it, `{"error": …}` by default. The chunks are closed when the client
    leaves.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[Json, None], failed: Callable[[ApiError], Json] = lambda error: error.body
    ):
        # x-accel-buffering: reverse proxies such as nginx would otherwise hold the events back.
        super().__init__((), headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._chunks = chunks
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream (ASGI)."""
        await _while_connected(self._run(scope, send), receive)

    _end = b"data: [DONE]\n\n"

    async def _run(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            first = await anext(chunks)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await _send_event(send, first)
                async for chunk in chunks:
                    await _send_event(send, chunk)
                await send({"type": "http.response.body", "body": self._end, "more_body": True})
            except (Exception, asyncio.CancelledError) as error:
                await _send_event(send, self._failed(api_error(error, scope)))
                if isinstance(error, asyncio.CancelledError):
                    raise
            finally:
                await send({"type": "http.response.body", "body": b""})


class TypedStream(EventStream):
    """Server-sent events that name their type, as OpenAI's Responses API has them; the last one is the end."""

    _end = b""


async def _send_event(send: Send, chunk: Json) -> None:
    name = f"event: {chunk['type']}\n" if "type" in chunk else ""
    data = json.dumps(chunk, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    await send({"type": "http.response.body", "body": f"{name}data: {data}\n\n".encode(), "more_body": True})


async def merged(streams: Sequence[AsyncGenerator[core.Event, None]]) -> AsyncGenerator[Numbered, None]:
    """Yields the events of all choices as they come. The first error ends all of them, as does closing this."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as events:
            async for one in events:
                yield 0, one
        return
    queue: asyncio.Queue[tuple[int, core.Event | Exception | None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            number, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                left -= 1
            else:
                yield number, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    number: int,
    stream: AsyncGenerator[core.Event, None],
    queue: asyncio.Queue[tuple[int, core.Event | Exception | None]],
) -> None:
    """Put the events of one choice into the queue, and None behind them, or the error that ended them."""
    try:
        async with aclosing(stream) as events:
            async for event in events:
                queue.put_nowait((number, event))
    except Exception as error:
        queue.put_nowait((number, error))
    else:
        queue.put_nowait((number, None))
