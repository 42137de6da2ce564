"""Clients: they send requests when these arrive, or when the answer before has ended, and note what comes when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.load.record import Load, Record
from benchmarks.load.workload import Ask


@dataclass(frozen=True)
class Delivery:
    """Some text of an answer, or (`last`) its end with its figures. Not all targets say which text."""

    last: bool = False
    output_tokens: int = 0
    prompt_tokens: int | None = None
    found_tokens: int | None = None
    text: str = ""


class Target(Protocol):
    """What answers requests. versions, served: what the report says of it, once it is open."""

    name: str
    versions: dict[str, str]

    @property
    def served(self) -> Mapping[str, Any]:
        """The columns `metric.SERVED`, as far as it has them."""

    async def open(self) -> None:
        """Start it."""

    def answer(self, ask: Ask) -> AsyncIterator[Delivery]:
        """The deliveries of one answer; the last one is marked."""

    async def close(self) -> None:
        """End it."""


Clock = Callable[[], float]


async def open_loop(target: Target, asks: Sequence[Ask], arrivals: Sequence[float], rate: float) -> Load:
    """Send each request when it arrives, whatever became of those before."""
    began = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - began

    async def send(ask: Ask, due: float) -> Record:
        await asyncio.sleep(max(0.0, due - now()))
        return await _one(target, ask, due, now)

    records = await asyncio.gather(*(send(ask, due) for ask, due in zip(asks, arrivals, strict=True)))
    return Load(records, rate=rate)


async def closed_loop(target: Target, asks: Sequence[Ask], clients: int) -> Load:
    """`clients` clients, each of which sends the next request when it has its answer."""
    began = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - began

    waiting, records = iter(asks), []

    async def client() -> None:
        for ask in waiting:
            records.append(await _one(target, ask, now(), now))

    await asyncio.gather(*(client() for _ in range(clients)))
    return Load(records, concurrency=clients)


async def _one(target: Target, ask: Ask, due: float, now: Clock) -> Record:
    record = Record(ask.id, due, sent=now())
    try:
        async for delivery in target.answer(ask):
            if not delivery.last:
                record.times.append(now())
                record.text += delivery.text
                continue
            record.output_tokens = delivery.output_tokens
            record.prompt_tokens, record.found_tokens = delivery.prompt_tokens, delivery.found_tokens
    except Exception as error:  # whatever it is, the load goes on and counts it
        record.error = f"{type(error).__name__}: {error}"
    record.done = now()
    if record.error is None and not record.times:
        record.times.append(record.done)  # an answer without text is there when it ends
    return record
