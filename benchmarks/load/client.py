"""Clients: they send requests when these arrive, or when the answer before has ended, and note what comes when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from benchmarks.load.workload import Ask


@dataclass(frozen=True)
class Delivery:
    """Some text of an answer, or (`last`) its end with its figures. Not all targets say which text."""

    last: bool = False
    output_tokens: int = 0
    prompt_tokens: int | None = None
    found_tokens: int | None = None
    text: str = ""
    cfo: float | None = None  # mean fix overhead of its chunks (Cache-Craft, eq. 12)


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
            record.cfo = delivery.cfo
    except Exception as error:  # whatever it is, the load goes on and counts it
        record.error = f"{type(error).__name__}: {error}"
    record.done = now()
    if record.error is None and not record.times:
        record.times.append(record.done)  # an answer without text is there when it ends
    return record


@dataclass
class Record:
    """One request. Times are seconds since the load began."""

    id: str
    due: float  # when it arrived
    sent: float = 0.0  # later than `due` only if the client itself was late
    times: list[float] = field(default_factory=list)  # of each delivery: a piece of text, which may hold several tokens
    done: float = 0.0  # when the answer ended
    output_tokens: int = 0
    prompt_tokens: int | None = None  # None: the system does not say
    found_tokens: int | None = None  # of the prompt, those whose KV was found
    cfo: float | None = None  # mean fix overhead of its chunks, where the target says it
    error: str | None = None  # why there is no answer
    text: str = ""  # of the answer, where the target says it

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from its arrival to its first delivery."""
        return (self.times[0] - self.due) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        """Milliseconds between deliveries."""
        return [(b - a) * 1e3 for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def total_s(self) -> float:
        return self.done - self.due


@dataclass(frozen=True)
class Load:
    """Requests measured together: under arrivals at `rate` a second (None: closed loop of `concurrency` clients)."""

    records: Sequence[Record]
    rate: float | None = None
    concurrency: int | None = None

    @property
    def answered(self) -> list[Record]:
        return [record for record in self.records if record.error is None]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end."""
        return max(r.done for r in self.records) - min(r.due for r in self.records)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Load:
        return cls([Record(**record) for record in value["records"]], value["rate"], value["concurrency"])
