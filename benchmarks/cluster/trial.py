"""One setting of replicas under load, and how a new replica fills."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.cluster.fleet import WORKLOADS, Figures, FleetServer, exact, requests
from benchmarks.common.envs import RivalError, redis
from benchmarks.load.client import Load, closed_loop, open_loop
from benchmarks.load.measure import found_share, percentile
from benchmarks.load.system import base_settings, options_of
from benchmarks.load.workload import Ask, Workload, poisson
from ragjax.cluster.fleet import ROUTING
from ragjax.core import Document

STRATEGY = "naive"  # chunks are found in any order, and nothing is recomputed: what is measured is what the router does
CONTEXT = 2048
EXACT_ASKS, EXACT_OUTPUT = 4, 16  # requests that every setting answers exactly, each twice, and tokens of these answers
COUNTED = ("prompt_tokens_total", "reused_tokens_total")

COLUMNS = (
    *("workload", "replicas", "router", "shared", "requests", "errors", "found", "ttft_p50_ms", "ttft_p95_ms"),
    *("requests_per_s", "route_us", "fullest", "exact", "equal"),
)
"""found: share of prompt tokens. route_us: mean time of choosing a replica. fullest: requests of the replica that had
most, over the mean. exact: answers of an exact strategy that were compared with those of one replica; equal: the share
of them that are the same text."""


@dataclass(frozen=True)
class Case:
    """A server. shared: with a shared tier. workloads: what it serves, one after the other."""

    replicas: int
    router: str
    shared: bool
    workloads: tuple[str, ...]

    @property
    def newcomer(self) -> bool:
        """Whether a replica is replaced at the end: where every one gets the same requests, and as many."""
        return self.router == "round-robin" and self.replicas == 2

    def __str__(self) -> str:
        return f"{self.replicas} replicas, {self.router}{', shared tier' if self.shared else ''}"


@dataclass(frozen=True)
class Plan:
    """What is asked of every server."""

    requests: int
    warm: int  # requests before those that count, of each workload
    clients: int
    rate: float | None  # requests a second; None: `clients` wait for their answers
    points: int  # of a new replica's curve
    step: int  # requests between two of them
    device_cache_gb: float


def cases(counts: Sequence[int], workloads: Sequence[str], quick: bool, tier: str | None = None) -> Iterator[Case]:
    """One replica first, whose exact answers are the measure; then more.

    tier: those "with" a shared tier, or "without" (None: both).
    """
    yield Case(1, "knowledge", False, (workloads[0],))
    many = (Case(*one, tuple(workloads)) for one in _of_many(counts, quick))
    yield from (case for case in many if tier is None or case.shared == (tier == "with"))


def _of_many(counts: Sequence[int], quick: bool) -> Iterator[tuple[int, str, bool]]:
    for count in counts:
        if quick:
            yield count, "round-robin", True
        elif count == 2:
            yield from ((2, router, False) for router in ("knowledge", "prefix", "two-choices", "round-robin"))
            yield from ((2, router, True) for router in ("knowledge", "round-robin"))
        elif count > 2:
            yield from ((count, router, False) for router in ("knowledge", "prefix", "round-robin"))


@dataclass
class Bench:
    """Measures cases.

    passages, questions: what requests are made of. ray_address: of a cluster that runs; None: each server starts one.
    """

    plan: Plan
    passages: Sequence[Document]
    questions: Sequence[str]
    ray_address: str | None = None

    def measure(self, case: Case) -> dict[str, Any]:
        print(f"{case}", file=sys.stderr)
        with ExitStack() as stack:
            url = stack.enter_context(redis()) if case.shared else None
            return asyncio.run(self._measure(case, self._server(case, url)))

    def _server(self, case: Case, url: str | None) -> FleetServer:
        plan = self.plan
        base = base_settings(dtype="auto", gigabytes=plan.device_cache_gb, context=CONTEXT)
        options = options_of(STRATEGY, {"host_gb": 0.0, "remote": url}, base)
        knowledge = Workload("replicas", (), tuple(self.passages))
        return FleetServer(case.replicas, case.router, options, knowledge, self.ray_address)

    async def _measure(self, case: Case, server: FleetServer) -> dict[str, Any]:
        await server.open()
        try:
            rows = [await self._row(case, workload, server) for workload in case.workloads]
            same = await server.exact(
                exact(self._asks(next(iter(WORKLOADS)))[:EXACT_ASKS], EXACT_OUTPUT), self.plan.clients
            )
            made = {"rows": rows, "texts": {record.id: record.text for record in _answered(same)}}
            return {**made, "curve": await self._curve(case, server) if case.newcomer else []}
        finally:
            await server.close()

    def _asks(self, workload: str) -> list[Ask]:
        plan = self.plan
        return requests(
            workload, self.passages, self.questions, plan.warm + plan.requests + plan.points * plan.step * 2
        )

    async def _row(self, case: Case, workload: str, server: FleetServer) -> dict[str, Any]:
        plan, asks = self.plan, self._asks(workload)
        warm, counted = asks[: plan.warm], asks[plan.warm :][: plan.requests]
        begun = sum(server.figures("requests_total")[0].values())
        _answered(await closed_loop(server, warm, plan.clients))
        names = ("requests_total", *ROUTING)
        before, *was = await server.settled(names, lambda found: _served(found, begun + len(warm)))
        if plan.rate is None:
            load = await closed_loop(server, counted, plan.clients)
        else:
            load = await open_loop(server, counted, poisson(plan.rate, len(counted), 0), plan.rate)
        total = sum(before.values()) + len(load.answered)
        after, *now = await server.settled(names, lambda found: _served(found, total))
        row = row_of(load, [after.get(rank, 0.0) - before.get(rank, 0.0) for rank in map(str, range(case.replicas))])
        kept = {name: value for name, value in asdict(case).items() if name != "workloads"}
        routed, seconds = (sum(b.values()) - sum(a.values()) for a, b in zip(was, now, strict=True))
        return {"workload": workload, **kept, **row, "route_us": seconds / routed * 1e6 if routed else None}

    async def _curve(self, case: Case, server: FleetServer) -> list[dict[str, Any]]:
        """Share found by a new replica and by its neighbour, between any two points."""
        plan = self.plan
        rank = await server.replace_one(COUNTED[0])
        ahead = iter(self._asks(case.workloads[-1])[plan.warm + plan.requests :])
        before, rows = server.figures("requests_total", *COUNTED), []
        for _ in range(plan.points):
            batch = [next(ahead) for _ in range(plan.step * case.replicas)]
            wanted = sum(before[0].values()) + len(batch)
            _answered(await closed_loop(server, batch, plan.clients))
            names = ("requests_total", *COUNTED)
            after = await server.settled(names, lambda found, wanted=wanted: _served(found, wanted))  # type: ignore[misc]
            rows.append({"shared": case.shared, **point_of(rank, before, after)})
            before = after
        return rows


def row_of(load: Load, served: Sequence[float]) -> dict[str, Any]:
    first = [record.ttft_ms for record in load.answered]
    return {
        "requests": len(load.records), "errors": len(load.records) - len(load.answered),
        "found": found_share(load.answered), "ttft_p50_ms": percentile(first, 50), "ttft_p95_ms": percentile(first, 95),
        "requests_per_s": len(load.answered) / load.seconds,
        "fullest": max(served) * len(served) / sum(served) if sum(served) else None,
    }  # fmt: skip


def point_of(rank: str, before: Sequence[Figures], after: Sequence[Figures]) -> dict[str, Any]:
    """A point of the curve of the replica of this rank. before, after: requests, and `COUNTED`, by replica.

    requests: of it since its start. found, neighbour: shares of prompt tokens since the point before. ratio: of these.
    """

    def share(ranks: set[str]) -> float:
        prompt, reused = (
            sum(now.get(one, 0.0) - was.get(one, 0.0) for one in ranks)
            for was, now in zip(before[1:], after[1:], strict=True)
        )
        return reused / prompt if prompt else 0.0

    own, others = share({rank}), share(after[1].keys() - {rank})
    ratio = own / others if others else None
    return {"requests": int(after[0].get(rank, 0)), "found": own, "neighbour": others, "ratio": ratio}


def compared(texts: Mapping[str, str], reference: Mapping[str, str]) -> dict[str, Any]:
    """How many exact answers there are, and the share that one replica gave too."""
    same = sum(text == reference[name] for name, text in texts.items())
    return {"exact": len(texts), "equal": same / len(texts)}


def _served(found: Figures, wanted: float) -> bool:
    return sum(found.values()) >= wanted


def _answered(load: Load) -> Sequence[Any]:
    """Its records, of requests that must not fail."""
    if failed := [record.error for record in load.records if record.error]:
        raise RivalError(f"{len(failed)} requests failed, the first with: {failed[0]}")
    return load.records
