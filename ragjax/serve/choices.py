"""Several answers to one body: each choice is a request of its own, and their events are told apart by number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from ragjax import core

MOST = 64
"""Choices of one body, at most: prompts times `n`."""

Numbered = tuple[int, core.Event]
"""An event, and the choice that it belongs to."""


def choices(requests: Sequence[core.Request], n: int) -> tuple[core.Request, ...]:
    """`n` requests of each, those of one behind another. The i-th of them has the seed plus i, if a seed is given.

    Raises:
        core.RequestError: if they are too many.
    """
    if len(requests) * n > MOST:
        reason = f"{len(requests)} prompts with {n} choices each were asked for; at most {MOST} choices are made"
        raise core.RequestError(f"{reason}. Send fewer", param="n" if n > 1 else "prompt", code="invalid_value")
    return tuple(_seeded(request, i) for request in requests for i in range(n))


def _seeded(request: core.Request, number: int) -> core.Request:
    seed = request.sampling.seed
    if not number or seed is None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=(seed + number) % 2**63))


async def merged(streams: Sequence[AsyncGenerator[core.Event, None]]) -> AsyncGenerator[Numbered, None]:
    """The events of all choices as they come. The first error ends all of them, as does closing this."""
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
