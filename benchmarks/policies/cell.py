"""What policies are compared on: workloads at capacities, on one tier and on two."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.baseline.policy.belady import Belady
from benchmarks.policies import bound, source
from benchmarks.policies.simulator import Served, Simulator, key_of
from benchmarks.policies.source import PATTERNS, Corpus, Workload
from ragjax.cache.policy import POLICIES
from ragjax.cache.policy.base import Policy, make_policy
from ragjax.cache.profile import Profile
from ragjax.core import ConfigError

SHARES = (0.1, 0.2, 0.4)
DOCUMENT_SHARES = (0.05, *SHARES)  # capacities, as shares of the distinct tokens
MOONCAKE_CAPACITIES = (500_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000)

TOP_K = (1, 2, 3, 5)
KEEP = 3  # of the top 5 (RAGCache, section 8)
HOST_SHARE = 0.8  # of the capacity that lies in host memory, where there are two tiers


@dataclass(frozen=True)
class Effort:
    """How much of everything; `questions` bounds the questions of each text set, `limit` whatever else is asked."""

    shares: Sequence[float] = SHARES
    document_shares: Sequence[float] = DOCUMENT_SHARES
    mooncake: Sequence[int] = MOONCAKE_CAPACITIES
    top_k: Sequence[int] = TOP_K
    queries: int = 500
    repeats: int = 5000
    questions: int | None = None
    limit: int | None = None


QUICK = Effort((0.2,), (0.2,), (2_000_000,), (2, 5), queries=200, repeats=2000, questions=50, limit=1000)


def effort(quick: bool) -> Effort:
    return QUICK if quick else Effort()


def limited(chosen: Effort, limit: int | None) -> Effort:
    if limit is None:
        return chosen
    most = min(limit, chosen.queries), min(limit, chosen.repeats)
    return replace(chosen, queries=most[0], repeats=most[1], questions=limit, limit=limit)


@dataclass(frozen=True)
class Cell:
    """One workload at one capacity, split over the tiers."""

    work: Workload
    capacity: int
    host: int

    @property
    def name(self) -> str:
        work = self.work
        return f"{work.name} top_k={work.top_k} keep={work.keep} capacity={self.capacity} host={self.host}"


def generated(data: Path, chosen: Effort) -> Iterator[tuple[Workload, Sequence[int]]]:
    """Workloads with their capacities, of whatever sets lie in `data`."""
    yield from _graphs(data, chosen)
    yield from _documents(data, chosen)
    for path in sorted(data.glob("traces/mooncake_*.jsonl")):
        yield source.mooncake(path).limited(chosen.limit), chosen.mooncake


def _graphs(data: Path, chosen: Effort) -> Iterator[tuple[Workload, Sequence[int]]]:
    files = sorted(data.glob("kg/*/kg.tsv")) or sorted(data.glob("kg/*/questions.jsonl"))
    if not files:
        return
    graph = source.graph_of(triple for path in files for triple in source.read_triples(path))
    for pattern in PATTERNS:
        work = source.entities(graph, pattern, queries=chosen.queries)
        yield work, _parts(work, chosen.shares)


def _documents(data: Path, chosen: Effort) -> Iterator[tuple[Workload, Sequence[int]]]:
    corpora = source.corpora(data, chosen.questions)
    if not corpora:
        return
    corpus = Corpus.union(corpora)
    retrieved = source.bm25(corpus, max(chosen.top_k))
    for top_k in chosen.top_k:
        for keep in (None, KEEP) if top_k == 5 else (None,):
            work = source.documents(corpus, retrieved, top_k, keep=keep, requests=chosen.repeats)
            yield work, _parts(work, chosen.document_shares)


def _parts(work: Workload, shares: Iterable[float]) -> list[int]:
    return [max(1, round(share * work.distinct)) for share in shares]


def cells(workloads: Iterable[tuple[Workload, Sequence[int]]]) -> Iterator[Cell]:
    for work, capacities in workloads:
        for capacity in capacities:
            yield Cell(work, capacity, 0)
            if (host := int(HOST_SHARE * capacity)) < capacity:
                yield Cell(work, capacity, host)


def workloads(chosen: argparse.Namespace, much: Effort) -> list[tuple[Workload, Sequence[int]]]:
    """What the command line asks for.

    Raises:
        ConfigError: if there is nothing to serve.
    """
    found = [(work, sizes) for work, sizes in generated(chosen.data, much) if work.requests]
    if not found:
        raise ConfigError(f"{chosen.data} holds no requests, graphs, corpora or traces")
    return found


NAMES = (*POLICIES, "lacr:half_life=inf", "belady")  # DepCache's formula 6 counts all requests alike

KV_BYTES = 2 * 30 * 3 * 64 * 2  # of a token: SmolLM2-135M in bfloat16 (keys and values, 30 layers, 3 KV heads, 64 wide)


def modelled() -> Profile:
    """T(cached, new) of LLaMA2-7B on an A10G, RAGCache's testbed, from the model's operations.

    A step reads all weights (14 GiB at 600 GB/s); 2 operations a weight and token; 4 a layer and unit of width for each
    token and token before it; 60 TFLOP/s, so that 4,000 tokens take the second that the paper measures (its Figure 2).
    """
    read, rate, linear, pair = 14 * 2**30 / 600e9, 60e12, 2 * 6.74e9, 4 * 32 * 4096
    cached = (0, *(2**i for i in range(7, 18)))
    new = tuple(2**i for i in range(18))

    def seconds(behind: int, n: int) -> float:
        return read + (linear * n + pair * n * (behind + n / 2)) / rate

    table = tuple(tuple(seconds(behind, n) for n in new) for behind in cached)
    return Profile(cached, new, table, "LLaMA2-7B on an A10G, from its operations")


def policy_of(name: str, work: Workload, profile: Profile) -> Policy:
    if name == "belady":
        return Belady([[key_of(node) for node in request.nodes] for request in work.requests])
    return make_policy(name, profile)


def serve(cell: Cell, name: str, profile: Profile) -> dict[str, Any]:
    """One row, without the bounds."""
    work = cell.work
    served = Simulator(work, policy_of(name, work, profile), cell.capacity - cell.host, cell.host).run()
    return {
        "workload": work.name, "policy": name, "capacity_tokens": cell.capacity, "host_tokens": cell.host,
        "top_k": work.top_k, "keep": work.keep, "moved_bytes": sum(one.moved for one in served) * KV_BYTES,
        **figures(work, served, profile),
    }  # fmt: skip


def figures(work: Workload, served: Sequence[Served], profile: Profile) -> dict[str, Any]:
    """Columns of all tables.

    recomputed_tokens include what is never kept. prefill_s: what the profile says all prefills take together.
    decision_us: median over requests of everything that is decided for one.
    """
    new = [total - one.hit for total, one in zip(work.totals, served, strict=True)]
    retrieved = sum(request.documents for request in work.requests)
    return {
        "requests": len(served), "token_hit_rate": bound.mean_rate([one.hit for one in served], work.totals),
        "document_hit_rate": sum(one.documents for one in served) / retrieved if retrieved else None,
        "recomputed_tokens": sum(new),
        "prefill_s": sum(profile.cost(one.hit, n) for one, n in zip(served, new, strict=True)),
        "decision_us": float(np.median([one.seconds for one in served])) * 1e6,
    }  # fmt: skip


@dataclass(frozen=True)
class Bounds:
    """Of a workload at a capacity, however it is split over tiers."""

    work: Workload
    capacity: int

    @cached_property
    def row(self) -> dict[str, Any]:
        return {
            "bound": bound.best_token_hit_rate(self.work, self.capacity),
            "min": bound.mean_rate(bound.minimum(self.work, self.capacity), self.work.totals),
            "document_bound": bound.best_document_hit_rate(self.work, self.capacity),
        }
