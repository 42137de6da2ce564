"""The points of a system: it is started once, warmed up, and put under one load after the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.common.envs import RivalError
from benchmarks.common.samples import Samples
from benchmarks.latency.load import OtherLoad
from benchmarks.load.arrival import Arrival, poisson, rescaled
from benchmarks.load.client import Target, closed_loop, open_loop
from benchmarks.load.metric import details, row_of
from benchmarks.load.record import Load
from benchmarks.load.search import LOWEST, MOST_POINTS, Throughput, geometric, throughput
from benchmarks.load.workload import Ask, Workload
from ragjax.core import ConfigError

CAPACITY_CLIENTS = 8
"""Clients of the closed loop that tells the capacity."""


@dataclass(frozen=True)
class Plan:
    """What is measured of every system.

    clients: closed loops. rates: open loops, requests a second. geometric: so many rates from a fifth of the capacity
    to all of it, where no rates are given. search: find the throughput. warm: requests before the first point, of one
    token each, which are not counted. requests: of a point. trace: whose arrivals are used, stretched to the rate.
    """

    requests: int
    warm: int
    seed: int = 0
    clients: Sequence[int] = ()
    rates: Sequence[float] = ()
    geometric: int = 0
    search: bool = False
    trace: Sequence[Arrival] = ()

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
        """Raises ConfigError if the workload has too few requests."""
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
            "system": self._target.name,
            "workload": self._workload.name,
            "throughput_per_s": found.rate,
            "ttft_mean_ms": found.ttft_ms,
            "lowest_ttft_mean_ms": found.lowest_ms,
        }

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
        """The requests of the next point."""
        begin = self._plan.warm + self._points * self._plan.requests
        self._points += 1
        return self._workload.asks[begin : begin + self._plan.requests]

    async def _ready(self) -> None:
        """Started and warm."""
        if self._opened:
            return
        print(f"starting {self._target.name}", file=sys.stderr)
        self._opened = True
        await self._target.open()
        if self._plan.warm:
            warm = [replace(ask, output=1) for ask in self._workload.asks[: self._plan.warm]]
            await closed_loop(self._target, warm, CAPACITY_CLIENTS)
