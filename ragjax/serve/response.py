"""Bodies of responses, in the form of OpenAI's API reference: whole, or as the chunks of a stream."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ragjax import core
from ragjax.serve.error import ApiError, api_error
from ragjax.serve.tool_calls import CallReader

if TYPE_CHECKING:
    from ragjax.cluster.fleet import Service

Json = dict[str, Any]
Numbered = tuple[int, core.Event]
"""An event, and the choice that it belongs to."""


class Form(ABC):
    """Writes one response, whole or in chunks. requests: one for each choice. n: choices of each prompt, in a row."""

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, engine: Service, requests: Sequence[core.Request], n: int, notices: Sequence[str]):
        number = f"{self.prefix}-{uuid.uuid4().hex}"
        self._engine = engine
        self._head: Json = {"id": number, "created": int(time.time()), "model": engine.model_name}
        self._want_logprobs = requests[0].sampling.logprobs is not None
        self._choices = len(requests)
        self._n = n
        self._notices = tuple(notices)

    async def whole(self, events: AsyncGenerator[Numbered, None]) -> Json:
        found: dict[int, core.Answer] = {}
        async with aclosing(events):
            # To the end, not to the answers only: closing earlier would be a cancellation.
            async for number, event in events:
                if isinstance(event, core.Answer):
                    found[number] = event
        answers = [found[number] for number in sorted(found)]
        choices = [self._end(i, self._message(i, one), one.logprobs, one) for i, one in enumerate(answers)]
        return self._object(self.kind, choices, usage=self._usage(answers), rag=self._rag(answers[0]))

    def opening(self) -> list[Json]:
        return []

    def chunks(self, number: int, event: core.Event) -> list[Json]:
        """Makes the chunks of one event; an answer's last one has no text, but `finish_reason` and the account."""
        if isinstance(event, core.Delta):
            said = self._deltas(number, event.text) or ([self._delta("")] if event.logprobs else [])
            made = (self._choice(number, one, None if i else event.logprobs) for i, one in enumerate(said))
            return [self._object(self.chunk_kind, [choice]) for choice in made]
        left = [self._object(self.chunk_kind, [self._choice(number, said)]) for said in self._left(number)]
        last = self._end(number, self._delta(None), None, event)
        return [*left, self._object(self.chunk_kind, [last], rag=self._rag(event))]

    async def stream(
        self, events: AsyncGenerator[Numbered, None], include_usage: bool, include_sources: bool = False
    ) -> AsyncGenerator[Json, None]:
        """Yields the chunks of a stream; the first waits for the first event, and so for the errors before it.

        With `include_usage`, each says `usage: null`, and one without choices follows with the sums. With
        `include_sources` the first has the passages of the prompt: an answer that is stopped has no account.
        """
        opening = self.opening()
        more = {"usage": None} if include_usage else {}
        answers: dict[int, core.Answer] = {}
        async with aclosing(events):
            async for number, event in events:
                chunks = [*opening, *self.chunks(number, event)]
                if include_sources and chunks and isinstance(event, core.Delta) and event.sources:
                    chunks[0] = {**chunks[0], "rag": {"sources": citations_of(event.sources)}}
                    include_sources = False
                for chunk in chunks:
                    yield {**chunk, **more}
                opening = []
                if isinstance(event, core.Answer):
                    answers[number] = event
        if include_usage:
            sums = self._usage([answers[number] for number in sorted(answers)])
            yield self._object(self.chunk_kind, [], usage=sums)

    def _rag(self, answer: core.Answer) -> Json:
        return account(answer, self._engine.pieces, self._notices)

    def _usage(self, answers: Sequence[core.Answer]) -> Json:
        """Counts tokens: a prompt once, with what was cached of it for its first choice."""
        first, completion = answers[:: self._n], sum(len(answer.tokens) for answer in answers)
        prompts = sum(answer.prompt_tokens for answer in first)
        cached, written = (sum(getattr(one, name) for one in first) for name in ("cached_tokens", "written"))
        return {
            "prompt_tokens": prompts,
            "completion_tokens": completion,
            "total_tokens": prompts + completion,
            "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        }

    def _object(self, kind: str, choices: list[Json], **more: Json) -> Json:
        return {**self._head, "object": kind, "choices": choices, **more}

    def _choice(self, number: int, said: Json, tokens: Sequence[core.TokenLogprob] | None = None) -> Json:
        logprobs = None if tokens is None or not self._want_logprobs else self._logprobs(tokens)
        return {"index": number, **said, "logprobs": logprobs, "finish_reason": None}

    def _end(self, number: int, said: Json, tokens: Sequence[core.TokenLogprob] | None, answer: core.Answer) -> Json:
        choice = {**self._choice(number, said, tokens), "finish_reason": self._reason(number, answer)}
        return {**choice, "rag": self._rag(answer)} if self._choices > 1 else choice

    def _reason(self, number: int, answer: core.Answer) -> str:
        return answer.finish_reason

    def _deltas(self, number: int, text: str) -> list[Json]:
        return [self._delta(text)]

    def _left(self, number: int) -> list[Json]:
        return []

    @abstractmethod
    def _message(self, number: int, answer: core.Answer) -> Json: ...

    @abstractmethod
    def _delta(self, text: str | None) -> Json: ...

    @abstractmethod
    def _logprobs(self, tokens: Sequence[core.TokenLogprob]) -> Json: ...


class ChatForm(Form):
    """Chat completions; a call of a tool stands in `tool_calls`, and not in the content."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, engine: Service, requests: Sequence[core.Request], n: int, notices: Sequence[str]):
        super().__init__(engine, requests, n, notices)
        self._readers = [CallReader.of(engine.call_form, request) for request in requests]

    def opening(self) -> list[Json]:
        said = {"delta": {"role": "assistant", "content": "", "refusal": None}}
        return [self._object(self.chunk_kind, [self._choice(i, said)]) for i in range(self._choices)]

    def _message(self, number: int, answer: core.Answer) -> Json:
        reader = self._readers[number]
        pieces = [*reader.push(answer.text), *reader.finish()]
        said = "".join(piece.said for piece in pieces)
        message: Json = {"role": "assistant", "content": said, "refusal": None}
        calls: list[Json] = []
        for piece in pieces:
            if piece.name:
                calls.append(_called(piece.name))
            elif calls:
                calls[-1]["function"]["arguments"] += piece.arguments
        if calls:
            message |= {"content": said or None, "tool_calls": calls}
        return {"message": message}

    def _reason(self, number: int, answer: core.Answer) -> str:
        whole = self._readers[number].ended and answer.finish_reason == "stop"  # else a stop string cut the call
        return "tool_calls" if whole else answer.finish_reason

    def _deltas(self, number: int, text: str) -> list[Json]:
        reader = self._readers[number]
        calls = len(reader.names)
        made = []
        for piece in reader.push(text):
            if piece.said:
                made.append(self._delta(piece.said))
            elif piece.name:
                made.append({"delta": {"tool_calls": [{"index": calls, **_called(piece.name)}]}})
                calls += 1
            else:
                said = {"index": calls - 1, "function": {"arguments": piece.arguments}}
                made.append({"delta": {"tool_calls": [said]}})
        return made

    def _left(self, number: int) -> list[Json]:
        return [self._delta(piece.said) for piece in self._readers[number].finish()]

    def _delta(self, text: str | None) -> Json:
        return {"delta": {} if text is None else {"content": text}}

    def _logprobs(self, tokens: Sequence[core.TokenLogprob]) -> Json:
        return {"content": logprobs_of(tokens, self._engine.token_bytes), "refusal": None}


def _called(name: str) -> Json:
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": ""}}


class TextForm(Form):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _message(self, number: int, answer: core.Answer) -> Json:
        return {"text": answer.text}

    def _delta(self, text: str | None) -> Json:
        return {"text": text or ""}

    def _logprobs(self, tokens: Sequence[core.TokenLogprob]) -> Json:
        """The legacy form: parallel lists. `text_offset` counts characters of the answer, over all chunks."""
        return {
            "tokens": [t.token for t in tokens],
            "token_logprobs": [_logprob(t.logprob) for t in tokens],
            "top_logprobs": [_alternatives(t) for t in tokens],
            "text_offset": [t.begin for t in tokens],
        }


class EchoForm(TextForm):
    """Text completions that begin with their prompts."""

    def __init__(self, engine: Service, requests: Sequence[core.Request], n: int, notices: Sequence[str]):
        super().__init__(engine, requests, n, notices)
        texts = (one.prompt or "" for one in requests)
        self._prompts = [text if isinstance(text, str) else "".join(engine.pieces(np.array(text))) for text in texts]

    def opening(self) -> list[Json]:
        return [
            self._object(self.chunk_kind, [self._choice(i, {"text": text})]) for i, text in enumerate(self._prompts)
        ]

    def _message(self, number: int, answer: core.Answer) -> Json:
        return {"text": self._prompts[number] + answer.text}

    def _logprobs(self, tokens: Sequence[core.TokenLogprob]) -> Json:
        told = super()._logprobs(tokens)
        told["token_logprobs"][0] = told["top_logprobs"][0] = None  # of the prompt's first token
        return told


def logprobs_of(tokens: Sequence[core.TokenLogprob], spelled: Callable[[int], bytes]) -> list[Json]:
    """Lists tokens with their log-probabilities and alternatives, in the form of chat and responses.

    spelled: the bytes of a token, which may be a piece of a character.
    """

    def one(text: str, token: int, logprob: float) -> Json:
        return {"token": text, "logprob": _logprob(logprob), "bytes": list(spelled(token))}

    return [
        {**one(t.token, t.id, t.logprob), "top_logprobs": [one(text, token, value) for text, token, value in t.top]}
        for t in tokens
    ]


def citations_of(sources: Sequence[core.Citation]) -> list[Json]:
    return [asdict(source) for source in sources]


def account(answer: core.Answer, pieces: Callable[[core.Tokens], list[str]], notices: Sequence[str]) -> Json:
    """Makes the field `rag`, the account of reuse. notices: of the request; those of the answer follow."""
    names = ("retrieve", "search_exposed", "load", "compile", "prefill", "ttft", "total")
    segments, start = list[Json](), 0
    for report in answer.segments:
        segments.append(asdict(report))
        if answer.prompt is None:  # tokens, and which of them were recomputed, are told only if asked for
            del segments[-1]["recomputed_at"]
        else:
            segments[-1]["pieces"] = pieces(answer.prompt[start : start + report.tokens])
        start += report.tokens
    return {
        "strategy": answer.strategy,
        "recompute_ratio": answer.recompute_ratio,
        "exact_to": answer.exact_to,
        "approximate": answer.exact_to is None,
        "predicted": None if answer.predicted is None else asdict(answer.predicted),
        "compression": None if answer.compression is None else {**asdict(answer.compression), "kept": answer.kept},
        "figures": dict(answer.figures),
        "segments": segments,
        "facts": [asdict(path) for path in answer.facts],
        "sources": citations_of(answer.sources),
        "timings_ms": {name: round(getattr(answer.timings, name), 3) for name in names},
        "notices": [*notices, *answer.notices],
        "notice_codes": [getattr(notice, "code", None) for notice in (*notices, *answer.notices)],
    }


def _logprob(value: float) -> float:
    # JSON has no -inf; OpenAI writes -9999.0 for a token of (almost) no probability.
    return max(float(value), -9999.0)


def _alternatives(token: core.TokenLogprob) -> dict[str, float]:
    # Two tokens may read the same; the likelier one comes first and is kept.
    found = {token.token: _logprob(token.logprob)}
    for text, _, value in token.top:
        found.setdefault(text, _logprob(value))
    return found


T = TypeVar("T")


async def respond(work: Coroutine[Any, Any, Json | bytes], request: Request) -> Response:
    """Answers with what `work` returns, once it is complete: a body, or one that is JSON already."""
    made = await _while_connected(work, request.receive)
    return Response(made, media_type="application/json") if isinstance(made, bytes) else JSONResponse(made)


async def _while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Returns what `work` returns; it is cancelled, and its clean-up awaited, as soon as the client leaves."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events of JSON chunks, then `end`; those with a type name it.

    The response begins with the first chunk, so an error before it becomes an HTTP error; a later one becomes the event
    that ends the stream: what `failed` makes of it, `{"error": …}` by default. The chunks are closed when the client
    leaves.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[Json, None],
        failed: Callable[[ApiError], Json] = lambda error: error.body,
        end: bytes = b"data: [DONE]\n\n",
    ):
        # x-accel-buffering: reverse proxies such as nginx would otherwise hold the events back.
        super().__init__((), headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._chunks = chunks
        self._failed, self._end = failed, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _while_connected(self._run(scope, send), receive)

    async def _run(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            first = await anext(chunks)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await _send_event(send, first)
                async for chunk in chunks:
                    await _send_event(send, chunk)
                await send({"type": "http.response.body", "body": self._end, "more_body": True})
            except BaseException as error:  # a panic of a library in Rust is no Exception
                await _send_event(send, self._failed(api_error(error, scope)))
                if isinstance(error, asyncio.CancelledError):
                    raise
            finally:
                await send({"type": "http.response.body", "body": b""})


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
    queue: asyncio.Queue[tuple[int, core.Event | BaseException | None]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[core.Event, None]) -> None:
        last: BaseException | None = None
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    queue.put_nowait((number, event))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            last = error
        queue.put_nowait((number, last))

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            number, event = await queue.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                left -= 1
            else:
                yield number, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
