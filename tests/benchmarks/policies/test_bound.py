"""Bounds of hit rates: against brute force, and never below what any policy reaches."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baseline.policy.belady import Belady
from benchmarks.baseline.policy.lfu import LFU
from benchmarks.policies import bound
from benchmarks.policies.simulator import Simulator, key_of
from benchmarks.policies.source import Forest, Request, Workload
from ragjax.cache.policy.base import LRU, Policy


def flat(requests: list[tuple[int, ...]], sizes: tuple[int, ...], others: tuple[int, ...] = ()) -> Workload:
    """Items that depend on nothing."""
    extra = others or (0,) * len(requests)
    made = tuple(Request(nodes, other, len(nodes)) for nodes, other in zip(requests, extra, strict=True))
    return Workload("flat", (-1,) * len(sizes), sizes, (True,) * len(sizes), made, sum(sizes))


def tree(seed: int, requests: int = 60) -> Workload:
    """Random chains of random lengths."""
    random, forest = np.random.default_rng(seed), Forest()
    made = []
    for _ in range(requests):
        nodes = [-1]
        for _ in range(int(random.integers(1, 6))):
            label = int(random.integers(4))
            nodes.append(forest.child(nodes[-1], label, 1 + (3 * label + len(nodes)) % 5, document=True))
        made.append(Request(tuple(nodes[1:]), int(random.integers(3)), len(nodes) - 1))
    return forest.workload("chains", made)


def best_by_trying(work: Workload, capacity: int, worth: Callable[[int, int], float]) -> float:
    """The most that any sequence of contents of single tokens can hit."""
    tokens = [(node, i) for node, size in enumerate(work.sizes) for i in range(size)]
    states = {frozenset(): 0.0}
    for at, request in enumerate(work.requests):
        used = frozenset(t for t in tokens if t[0] in request.nodes)
        later: dict[frozenset[tuple[int, int]], float] = {}
        for held, value in states.items():
            gained = value + sum(worth(at, node) for node, _ in held & used)
            candidates = sorted(held | used)
            for kept in itertools.combinations(candidates, min(capacity, len(candidates))):
                state = frozenset(kept)
                later[state] = max(later.get(state, 0.0), gained)
        states = later
    return max(states.values())


requests_of = st.lists(st.sets(st.integers(0, 3), min_size=1, max_size=3).map(tuple), min_size=2, max_size=6)
sizes_of = st.tuples(*[st.integers(1, 2)] * 4)


@given(requests_of, sizes_of, st.integers(1, 4))
def test_minimum_saves_the_most_tokens(requests: list[tuple[int, ...]], sizes: tuple[int, ...], capacity: int) -> None:
    work = flat(requests, sizes)
    assert sum(bound.minimum(work, capacity)) == best_by_trying(work, capacity, lambda at, node: 1)


@given(requests_of, sizes_of, st.integers(1, 4), st.lists(st.integers(0, 9), min_size=6, max_size=6))
def test_the_best_rates_are_reached_and_not_passed(
    requests: list[tuple[int, ...]], sizes: tuple[int, ...], capacity: int, others: list[int]
) -> None:
    work = flat(requests, sizes, tuple(others[: len(requests)]))
    rate = best_by_trying(work, capacity, lambda at, node: 1 / work.totals[at]) / len(requests)
    assert bound.best_token_hit_rate(work, capacity) == pytest.approx(rate, abs=1e-9)
    share = best_by_trying(work, capacity, lambda at, node: 1 / sizes[node]) / sum(len(r) for r in requests)
    assert bound.best_document_hit_rate(work, capacity) == pytest.approx(share, abs=1e-9)


def test_the_mean_over_requests_can_pass_the_minimum() -> None:
    """Why there are two bounds: the tokens used again soonest may be those of a long request."""
    work = flat([(0,), (1,), (0,), (1,)], (1, 1), others=(0, 0, 99, 0))
    assert bound.mean_rate(bound.minimum(work, 1), work.totals) == pytest.approx(0.01 / 4)
    assert bound.best_token_hit_rate(work, 1) == pytest.approx(1 / 4)


@pytest.mark.parametrize("capacity", [1, 7, 20, 60])
@pytest.mark.parametrize("seed", range(3))
def test_no_policy_passes_the_bounds(seed: int, capacity: int) -> None:
    work = tree(seed)
    best, most = bound.best_token_hit_rate(work, capacity), sum(bound.minimum(work, capacity))
    documents = bound.best_document_hit_rate(work, capacity)
    assert documents is not None
    future = [[key_of(n) for n in r.nodes] for r in work.requests]
    policies: list[Policy] = [LRU(), LFU(), Policy(), Belady(future)]
    for policy in policies:
        served = Simulator(work, policy, capacity).run()
        hits = [one.hit for one in served]
        assert bound.mean_rate(hits, work.totals) <= best + 1e-9
        assert sum(hits) <= most
        assert sum(one.documents for one in served) / sum(r.documents for r in work.requests) <= documents + 1e-9


def test_everything_fits_or_nothing_does() -> None:
    work = flat([(0, 1), (0, 1), (2,), (0, 2)], (3, 4, 5))
    assert bound.minimum(work, 100) == [0, 7, 0, 8]
    assert bound.minimum(work, 0) == [0, 0, 0, 0]
    assert bound.best_token_hit_rate(work, 100) == pytest.approx((0 + 1 + 0 + 1) / 4)
    assert bound.best_token_hit_rate(work, 0) == 0.0
    assert bound.best_token_hit_rate(flat([(0,), (1,)], (1, 1)), 5) == 0.0
    assert bound.mean_rate([], []) == 0.0


def test_a_workload_without_documents_has_no_document_bound() -> None:
    work = Workload("x", (-1,), (3,), (False,), (Request((0,)), Request((0,))), 3)
    assert bound.best_document_hit_rate(work, 3) is None
