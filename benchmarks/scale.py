"""What the cache's decisions cost with a million nodes: memory, and time for a request of ten segments.

Runs of 16 tokens in pages of 16; requests draw documents by Zipf's law. A decision is: announce a request that begins
to wait, let another one start, match and pin its ten segments, update the policy, choose and evict as many victims as
two new segments take, admit these, release. Keys are computed beforehand. RAGCache reports 0.9 ms for a small tree
(table 4).
"""

from __future__ import annotations

import gc
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import psutil

import benchmarks.baseline  # noqa: F401 (registers its names)
from benchmarks.common.report import Benchmark, Parser, Session
from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.lookahead import Causal
from ragjax.cache.node import raw_of
from ragjax.cache.policy import POLICIES
from ragjax.cache.pool import PagePool
from ragjax.cache.profile import Profile
from ragjax.commands.flags import integer
from ragjax.core import Tokens

RUN, SEGMENTS, NEW, WINDOW = 16, 10, 2, 32
CUTS = tuple(range(0, RUN * SEGMENTS, RUN))
COLUMNS = ("policy", "nodes", "gb", "decision_us", "p99_us", "match_us", "evict_us", "admit_us", "release_us")


def filled(policy: str, nodes: int) -> tuple[KnowledgeCache, list[Tokens]]:
    profile = Profile((0, 1000), (1, 1000), ((0.001, 0.1), (0.002, 0.2)))
    cache = KnowledgeCache(b"scale", PagePool(nodes + 1 + SEGMENTS, RUN), POLICIES[policy].for_device(profile))
    random = np.random.default_rng(0)
    documents = [random.integers(0, 30_000, RUN * SEGMENTS).astype(np.int32) for _ in range(nodes // SEGMENTS)]
    for tokens in documents:
        compute(cache, tokens)
    return cache, documents


def compute(cache: KnowledgeCache, tokens: Tokens) -> tuple[float, ...]:
    """One request's life; when each part of it was done."""
    began = time.perf_counter()
    match = cache.matcher.match_prefix(tokens)
    matched = time.perf_counter()
    run = cache.reserve(len(tokens) - match.length) if match.length < len(tokens) else None
    reserved = time.perf_counter()
    if run is not None:
        cache.admitter.admit_prefix(match, tokens, match.length, run, CUTS)
        cache.free(run)
    admitted = time.perf_counter()
    match.release()
    return (began, matched, reserved, admitted, time.perf_counter())


def requests(documents: Sequence[Tokens], count: int) -> list[Tokens]:
    random = np.random.default_rng(1)
    ranks = random.zipf(1.3, count) % len(documents)
    fresh = random.integers(30_000, 60_000, (count, RUN * NEW)).astype(np.int32)
    return [np.concatenate([documents[r][: -RUN * NEW], new]) for r, new in zip(ranks, fresh, strict=True)]


def measure(policy: str, nodes: int, count: int) -> dict[str, Any]:
    """Median microseconds of a decision and its parts."""
    before = psutil.Process().memory_info().rss
    cache, documents = filled(policy, nodes)
    size = len(cache.tree)
    used = psutil.Process().memory_info().rss - before
    gc.collect()
    gc.freeze()  # as a server does that wants no pauses; the tree has no garbage in circles
    asked = requests(documents, count + WINDOW)
    keys = [Causal(raw_of(tokens), CUTS).keys(cache.tree) for tokens in asked]
    for i in range(WINDOW):
        cache.announce(str(i), keys[i])
    times, parts = [], []
    for i in range(count):
        began = time.perf_counter()
        cache.announce(str(i + WINDOW), keys[i + WINDOW])
        cache.withdraw(str(i))
        marks = compute(cache, asked[i])
        times.append((marks[-1] - began) * 1e6)
        parts.append([(b - a) * 1e6 for a, b in pairwise((began, *marks[1:]))])
    match, evict, admit, release = np.median(parts, axis=0)
    return {
        "policy": policy, "nodes": size, "gb": used / 1e9, "decision_us": float(np.median(times)),
        "p99_us": float(np.quantile(times, 0.99)), "match_us": match, "evict_us": evict, "admit_us": admit,
        "release_us": release,
    }  # fmt: skip


def rows(chosen: Namespace, _: Session) -> list[dict[str, Any]]:
    return [measure(chosen.policy, chosen.nodes, 300 if chosen.quick else 3000)]


def options(flags: Parser) -> None:
    flags.add("--nodes", type=integer(SEGMENTS), default=1_000_000, quick=100_000, help="of the tree")
    flags.add("--policy", choices=tuple(POLICIES), default="lacr", help="replacement policy")


main = Benchmark("scale", __doc__, COLUMNS, rows, options).main

if __name__ == "__main__":
    sys.exit(main())
