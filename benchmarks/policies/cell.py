"""What policies are compared on: workloads at capacities, on one tier and on two."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.policies import source
from benchmarks.policies.source import Corpus
from benchmarks.policies.workload import PATTERNS, Workload
from ragjax.core import ConfigError

SHARES = (0.1, 0.2, 0.4)
DOCUMENT_SHARES = (0.05, *SHARES)
"""Capacities, as shares of the distinct tokens."""

MOONCAKE_CAPACITIES = (500_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000)

TOP_K = (1, 2, 3, 5)
KEEP = 3
"""Of the top 5 (RAGCache, section 8)."""

HOST_SHARE = 0.8
"""Of the capacity that lies in host memory, where there are two tiers."""


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


def effort(quick: bool, limit: int | None) -> Effort:
    """What the flags say."""
    chosen = QUICK if quick else Effort()
    if limit is None:
        return chosen
    return replace(
        chosen, queries=min(limit, chosen.queries), repeats=min(limit, chosen.repeats), questions=limit, limit=limit
    )


@dataclass(frozen=True)
class Cell:
    """One workload at one capacity, split over the tiers."""

    work: Workload
    capacity: int
    host: int

    @property
    def name(self) -> str:
        """Tells it from all others of a run."""
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
    """Every workload at every capacity, on one tier and on two."""
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
    if chosen.trace is not None:
        work = source.recorded(chosen.trace).limited(chosen.limit)
        found: list[tuple[Workload, Sequence[int]]] = [(work, _parts(work, much.shares))]
    else:
        found = list(generated(chosen.data, much))
    found = [(work, sizes) for work, sizes in found if work.requests]
    if not found:
        raise ConfigError(f"{chosen.trace or chosen.data} holds no requests, graphs, corpora or traces")
    return found
