"""Workloads for replacement policies: requests over one tree of token runs, and the patterns by which they draw.

A workload is generated or recorded: `benchmarks.policies.source`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Request:
    """nodes: what it uses of the tree, parents first. other: tokens computed each time and never kept (the question).

    documents: how many it retrieved; more than its document nodes where some are not to be kept.
    """

    nodes: tuple[int, ...]
    other: int = 0
    documents: int = 0


@dataclass(frozen=True)
class Workload:
    """Requests over a tree of runs. Node n has sizes[n] tokens, hangs under parents[n] (-1: none) < n.

    documents[n]: whether the node counts as a retrieved document. distinct: tokens of the data, for capacities.
    top_k: documents retrieved for each request. keep: how many of them may be kept (None: all).
    """

    name: str
    parents: tuple[int, ...]
    sizes: tuple[int, ...]
    documents: tuple[bool, ...]
    requests: tuple[Request, ...]
    distinct: int
    top_k: int | None = None
    keep: int | None = None

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Tokens of each request, the never kept ones included."""
        return tuple(sum(self.sizes[n] for n in r.nodes) + r.other for r in self.requests)

    def limited(self, count: int | None) -> Workload:
        """The first `count` requests (None: all), whose distinct tokens are those that they have."""
        served = self.requests[:count]
        if len(served) == len(self.requests):
            return self
        nodes = {node for request in served for node in request.nodes}
        return replace(self, requests=served, distinct=sum(self.sizes[node] for node in nodes))


class Forest:
    """Builds the tree of a workload: the same label under the same parent is the same node."""

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.sizes: list[int] = []
        self.documents: list[bool] = []
        self._at: dict[tuple[int, Hashable], int] = {}

    def child(self, parent: int, label: Hashable, tokens: int, document: bool = False) -> int:
        """The node with this label under `parent` (-1: at the top), made if there is none."""
        found = self._at.setdefault((parent, label), len(self.sizes))
        if found == len(self.sizes):
            if tokens < 1:
                raise ValueError(f"a node holds at least one token, not {tokens} ({label!r})")
            self.parents.append(parent)
            self.sizes.append(tokens)
            self.documents.append(document)
        return found

    def workload(self, name: str, requests: Iterable[Request], distinct: int | None = None) -> Workload:
        """The finished workload; `distinct` is all tokens of the tree unless it is given."""
        served = tuple(requests)  # first: they may be made, and the tree with them, while they are read
        total = sum(self.sizes) if distinct is None else distinct
        return Workload(name, tuple(self.parents), tuple(self.sizes), tuple(self.documents), served, total)


# ---------------------------------------------------------------------------------- access patterns


@dataclass(frozen=True)
class Pattern:
    """Which items the requests ask for; each draws without repetition.

    skew: Zipf exponent of the items' popularity (0: all alike).
    recent: probability that a draw repeats an item of an earlier request, `age` requests ago, where age is geometric
    with mean `memory` requests; otherwise, and where that item is in the request already, a fresh draw.
    """

    skew: float = 0.0
    recent: float = 0.0
    memory: float = 1.0

    def draw(self, items: int, per_request: int, requests: int, seed: int) -> list[list[int]]:
        """For each request the numbers of its items, in the order drawn."""
        if not 0 < per_request <= items:
            raise ValueError(f"per_request must be 1 to {items} (the number of items), not {per_request}")
        random = np.random.default_rng(seed)
        weights = np.arange(1, items + 1) ** -self.skew
        order, shares = random.permutation(items), weights / weights.sum()
        drawn: list[list[int]] = []
        for _ in range(requests):
            chosen: dict[int, None] = {}
            while len(chosen) < per_request:
                chosen.setdefault(self._one(random, drawn, order, shares))
            drawn.append(list(chosen))
        return drawn

    def _one(self, random: np.random.Generator, drawn: list[list[int]], order: Any, shares: Any) -> int:
        if drawn and random.random() < self.recent:
            age = int(random.geometric(1 / self.memory))
            if age <= len(drawn):
                return int(random.choice(drawn[-age]))
        return int(order[random.choice(len(order), p=shares)])


PATTERNS = {
    "uniform": Pattern(),
    "zipf": Pattern(skew=1.0),
    "temporal": Pattern(recent=0.6, memory=10.0),
}
"""DepCache names the patterns and not their parameters: these are ours.

Zipf with exponent 1; temporal repeats an item with probability 0.6, on average of ten requests ago.
"""
