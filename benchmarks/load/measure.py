"""The points of a system: it is started once, warmed up, and put under one load after the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.common.envs import RivalError
from benchmarks.common.samples import Samples
from benchmarks.latency.system import OtherLoad
from benchmarks.load.client import Load, Record, Target, closed_loop, open_loop
from benchmarks.load.workload import Ask, Workload, poisson, rescaled
from ragjax.core import ConfigError

CAPACITY_CLIENTS = 8  # clients of the closed loop that tells the capacity


@dataclass(frozen=True)
class Plan:
    """What is measured of every system."""

    requests: int  # of a point
    warm: int  # requests before the first point, which are not counted
    seed: int = 0
    clients: Sequence[int] = ()  # closed loops
    rates: Sequence[float] = ()  # open loops, requests a second
    geometric: int = 0  # so many rates from a fifth of the capacity to all of it, where no rates are given
    search: bool = False  # find the throughput
    trace: Sequence[float] = ()  # seconds of arrivals that are used, stretched to the rate
    warm_output: int = 1  # tokens of each warm request

    @property
    def count(self) -> int:
        """Requests that a workload needs: no point asks what another one asked, whose KV is known."""
        capacity = bool(self.search or self.geometric)
        points = len(self.clients) + len(self.rates) + capacity + self.geometric + self.search * MOST_POINTS
        return self.warm + points * self.requests

    def arrivals(self, rate: float) -> list[float]:
        """Seconds at which the requests of a point arrive."""
        if self.trace:
            return rescaled(self.trace, rate, self.requests)
        return poisson(rate, self.requests, self.seed)


@dataclass
class Results:
    """Rows, and what does not fit into them."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    details: list[dict[str, Any]] = field(default_factory=list)
    throughput: list[dict[str, Any]] = field(default_factory=list)


class Bench:
    """One system under all loads of a plan; points that are in `samples` are not measured again."""

    def __init__(self, target: Target, workload: Workload, plan: Plan, samples: Samples):
        if len(workload.asks) < plan.count:
            raise ConfigError(
                f"{workload.name} has {len(workload.asks)} requests, and {plan.count} are asked: give fewer by "
                "--requests or --warm, or fewer points"
            )
        self._target, self._workload, self._plan, self._samples = target, workload, plan, samples
        self._opened = False
        self._points = 0

    async def measure(self, results: Results) -> None:
        """Add to `results`.

        Raises:
            RivalError: if the system cannot be started, or answers nothing.
        """
        try:
            await self._measure(results)
        finally:
            if self._opened:
                await self._target.close()

    async def _measure(self, results: Results) -> None:
        plan = self._plan
        for clients in plan.clients:
            await self._closed(clients, results)
        for rate in plan.rates:
            await self._open_loop(rate, results)
        if not (plan.search or plan.geometric):
            return
        capacity = (await self._closed(CAPACITY_CLIENTS, results))["requests_per_s"]
        for rate in geometric(capacity, plan.geometric) if plan.geometric else ():
            await self._open_loop(rate, results)
        if plan.search:

            async def mean_ttft(rate: float) -> float:
                return float((await self._open_loop(rate, results))["ttft_mean_ms"])

            found = await throughput(mean_ttft, LOWEST * capacity)
            results.throughput.append(self._throughput(found))

    def _throughput(self, found: Throughput) -> dict[str, Any]:
        return {
            "system": self._target.name, "workload": self._workload.name, "throughput_per_s": found.rate,
            "ttft_mean_ms": found.ttft_ms, "lowest_ttft_mean_ms": found.lowest_ms,
        }  # fmt: skip

    async def _closed(self, clients: int, results: Results) -> dict[str, Any]:
        return await self._point(f"clients {clients}", clients, None, results)

    async def _open_loop(self, rate: float, results: Results) -> dict[str, Any]:
        return await self._point(f"rate {rate:.4g}", None, rate, results)

    async def _point(self, what: str, clients: int | None, rate: float | None, results: Results) -> dict[str, Any]:
        asks = self._next()
        key = f"{self._target.name}/{self._workload.digest(asks)[:12]}/{what}"
        kept = self._samples.get(key)
        if kept is None:
            await self._ready()
            others = OtherLoad(os.getpid())
            if clients is not None:
                load = await closed_loop(self._target, asks, clients)
            else:
                assert rate is not None
                load = await open_loop(self._target, asks, self._plan.arrivals(rate), rate)
            if not load.answered:
                raise RivalError(f"{self._target.name} answered nothing: {load.records[0].error}")
            kept = {"load": load.to_json(), "served": dict(self._target.served), "versions": self._target.versions}
            kept["other_load"] = others.so_far()
            self._samples.put(key, kept)
            print(f"{self._target.name}, {self._workload.name}: {what} measured", file=sys.stderr)
        load = Load.from_json(kept["load"])
        row = row_of(self._target.name, self._workload.name, kept["served"], load)
        results.rows.append(row)
        names = ("system", "workload", "rate", "concurrency")
        results.details.append(
            {**{name: row[name] for name in names}, **details(load), "other_load": kept["other_load"]}
        )
        self._target.versions |= kept["versions"]
        return row

    def _next(self) -> Sequence[Ask]:
        begin = self._plan.warm + self._points * self._plan.requests
        self._points += 1
        return self._workload.asks[begin : begin + self._plan.requests]

    async def _ready(self) -> None:
        if self._opened:
            return
        print(f"starting {self._target.name}", file=sys.stderr)
        self._opened = True
        await self._target.open()
        if self._plan.warm:
            warm = [
                replace(ask, output=min(ask.output, self._plan.warm_output))
                for ask in self._workload.asks[: self._plan.warm]
            ]
            await closed_loop(self._target, warm, CAPACITY_CLIENTS)


BOUND = 5.0  # mean TTFT allowed, in those at the lowest rate
LOWEST = 0.2  # the lowest rate, as a share of capacity
GROWTH = 1.5  # A rate over the one before, until the bound is passed
RAISES = 12  # rates tried before the search gives up raising
HALVINGS = 3  # of the gap between the last good rate and the first bad one
MOST_POINTS = 1 + RAISES + HALVINGS  # rates that a search measures at most


@dataclass(frozen=True)
class Throughput:
    rate: float  # requests a second
    ttft_ms: float  # mean time to first token at that rate
    lowest_ms: float  # the same at the lowest rate


async def throughput(
    mean_ttft: Callable[[float], Awaitable[float]], lowest: float, *, halvings: int = HALVINGS
) -> Throughput:
    """Raise the rate from `lowest` until the mean TTFT passes the bound, then halve the gap.

    mean_ttft: milliseconds at a rate; it is asked once a rate.
    """
    base = await mean_ttft(lowest)
    good, good_ms, bad = lowest, base, None
    for _ in range(RAISES):
        rate = good * GROWTH
        found = await mean_ttft(rate)
        if found > BOUND * base:
            bad = rate
            break
        good, good_ms = rate, found
    for _ in range(halvings if bad is not None else 0):
        assert bad is not None
        middle = (good + bad) / 2
        found = await mean_ttft(middle)
        if found > BOUND * base:
            bad = middle
        else:
            good, good_ms = middle, found
    return Throughput(good, good_ms, base)


def geometric(capacity: float, count: int) -> list[float]:
    """`count` rates in equal ratios, from `LOWEST` of the capacity to all of it."""
    if count == 1:
        return [capacity]
    step = (1 / LOWEST) ** (1 / (count - 1))
    return [capacity * LOWEST * step**i for i in range(count)]


COLUMNS = (
    "system", "workload", "strategy", "policy", "order", "speculate", "rate", "concurrency", "requests",
    "ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "requests_per_s", "tokens_per_s",
    "found_share", "cfo", "errors",
)  # fmt: skip
"""Fields of a row, all of them."""

SERVED = ("strategy", "policy", "order", "speculate")  # fields that say how a system serves


def row_of(system: str, workload: str, served: Mapping[str, Any], load: Load) -> dict[str, Any]:
    """One row. served: `SERVED`, as far as the system has them.

    A request that failed counts in `requests` and `errors` and in nothing else.
    """
    answered = load.answered
    first = [record.ttft_ms for record in answered]
    gaps = [gap for record in answered for gap in record.gaps_ms]
    seconds = load.seconds
    return {
        "system": system, "workload": workload, **{name: served.get(name) for name in SERVED}, "rate": load.rate,
        "concurrency": load.concurrency, "requests": len(load.records), "ttft_mean_ms": _mean(first),
        "ttft_p50_ms": percentile(first, 50), "ttft_p99_ms": percentile(first, 99), "itl_p50_ms": percentile(gaps, 50),
        "itl_p99_ms": percentile(gaps, 99), "requests_per_s": len(answered) / seconds,
        "tokens_per_s": sum(record.output_tokens for record in answered) / seconds,
        "found_share": found_share(answered), "cfo": _mean([r.cfo for r in answered if r.cfo is not None]),
        "errors": len(load.records) - len(answered),
    }  # fmt: skip


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` percent lie, between two neighbours by the line through them."""
    return float(np.percentile(values, share)) if values else None


def found_share(records: Sequence[Record]) -> float | None:
    """Share of all prompt tokens whose KV was found; None where a system does not say."""
    said = [r for r in records if r.found_tokens is not None and r.prompt_tokens]
    if not said:
        return None
    return sum(r.found_tokens or 0 for r in said) / sum(r.prompt_tokens or 0 for r in said)


def details(load: Load) -> dict[str, Any]:
    """How evenly requests were served, and how much work they were.

    jain: Jain's index of seconds a token of the answer took, 1 if all were served alike, 1/n if one got everything.
    longest_wait_ms: the longest time to a first token. late_ms: how late the client itself was, at most.
    prompt_tokens, output_tokens: means, which tell whether systems did the same work.
    """
    answered = load.answered
    slow = np.array([r.total_s / max(1, r.output_tokens) for r in answered])
    return {
        "jain": float(slow.sum() ** 2 / (len(slow) * (slow**2).sum())) if len(slow) else None,
        "longest_wait_ms": max((r.ttft_ms for r in answered), default=None),
        "late_ms": max((1e3 * (r.sent - r.due) for r in load.records), default=None),
        "prompt_tokens": _mean([r.prompt_tokens for r in answered if r.prompt_tokens is not None]),
        "output_tokens": _mean([r.output_tokens for r in answered]),
    }
