"""Bounds that no replacement policy passes: Belady's MIN over single tokens, with bypass.

Every token counts for itself: it may be kept or dropped whatever becomes of its run and of the context it needs, and
what a request computed need not be kept (bypass). Between two requests that use the same token it either stays, which
takes one cell all that time, or it is computed again. MIN (Belady 1966) keeps those used again soonest, and saves the
most tokens. A mean over requests weighs tokens of short requests more, so its own optimum is a flow: cells pass from
request to request, idle or holding a token, at the profit of the hit.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog  # type: ignore[import-untyped]
from scipy.sparse import coo_matrix  # type: ignore[import-untyped]

from benchmarks.policies.source import Workload


def minimum(work: Workload, capacity: int) -> list[int]:
    hits = []
    held: Counter[int] = Counter()  # next use -> tokens kept for it
    farthest: list[int] = []
    full = 0
    for at, again in enumerate(_next_uses(work)):
        hits.append(held.pop(at, 0))
        full -= hits[-1]
        for then, tokens in again.items():
            if then not in held:
                heapq.heappush(farthest, -then)
            held[then] += tokens
            full += tokens
        while full > capacity:
            then = -farthest[0]
            dropped = min(full - capacity, held[then])
            held[then] -= dropped
            full -= dropped
            if not held[then]:
                heapq.heappop(farthest)
                del held[then]
    return hits


def best_token_hit_rate(work: Workload, capacity: int) -> float:
    """The highest mean over requests of hit/total tokens that `capacity` cells allow."""
    profit: dict[tuple[int, int, float], float] = defaultdict(float)
    for at, again in enumerate(_next_uses(work)):
        for then, tokens in again.items():
            profit[at, then, 1 / work.totals[then]] += tokens
    return _best(profit, len(work.requests), capacity) / max(len(work.requests), 1)


def best_document_hit_rate(work: Workload, capacity: int) -> float | None:
    """The highest share of retrieved documents hit, parts of documents included; None if none are retrieved."""
    retrieved = sum(r.documents for r in work.requests)
    if not retrieved:
        return None
    profit: dict[tuple[int, int, float], float] = defaultdict(float)
    last: dict[int, int] = {}
    for at, request in enumerate(work.requests):
        for node in request.nodes:
            if work.documents[node] and node in last:
                profit[last[node], at, 1 / work.sizes[node]] += work.sizes[node]
            last[node] = at
    return _best(profit, len(work.requests), capacity) / retrieved


def _next_uses(work: Workload) -> list[Counter[int]]:
    found: list[Counter[int]] = [Counter() for _ in work.requests]
    last: dict[int, int] = {}
    for at, request in enumerate(work.requests):
        for node in request.nodes:
            if node in last:
                found[last[node]][at] += work.sizes[node]
            last[node] = at
    return found


def _best(profit: dict[tuple[int, int, float], float], requests: int, capacity: int) -> float:
    """Profit of the best set of stays (from, until, profit of a token) -> tokens that never needs more cells.

    A flow of `capacity` cells from the first request to the last over stays and idle cells. Such a program has an
    integral optimum, so it is what the best cache of single tokens reaches.
    """
    stays = [(at, then, each, tokens) for (at, then, each), tokens in profit.items()]
    if not stays or capacity < 1:
        return 0.0
    starts, ends, each, tokens = (np.array(column, np.float64) for column in zip(*stays, strict=True))
    idle = np.arange(requests - 1)
    leaving = np.concatenate([starts, idle]).astype(int)
    arriving = np.concatenate([ends, idle + 1]).astype(int)
    columns = np.arange(len(leaving))
    ones = np.ones(len(leaving))
    network = coo_matrix(
        (np.concatenate([ones, -ones]), (np.concatenate([leaving, arriving]), np.concatenate([columns, columns]))),
        shape=(requests, len(leaving)),
    ).tocsr()
    supply = np.zeros(requests)
    supply[0], supply[-1] = capacity, -capacity
    solved = linprog(
        -np.concatenate([each, np.zeros(len(idle))]), A_eq=network, b_eq=supply,
        bounds=np.column_stack([np.zeros(len(leaving)), np.concatenate([tokens, np.full(len(idle), capacity)])]),
        method="highs",
    )  # fmt: skip
    if solved.status != 0:
        raise RuntimeError(f"the bound was not found: {solved.message}")
    return float(-solved.fun)


def mean_rate(hits: Sequence[int], totals: Sequence[int]) -> float:
    """Mean over requests of hit/total tokens (DepCache, section 6.1)."""
    return float(np.mean([h / t if t else 0.0 for h, t in zip(hits, totals, strict=True)])) if totals else 0.0
