"""Variants of a chunk: KV computed behind other neighbours, N times M of them in total (Cache-Craft, section 3.3).

A chunk may have any number of variants as long as all chunks together keep to the limit. At the limit the one that was
reused least leaves before a new one is added, where reuse is f_r, the sum of 1/CFO over its uses. A new variant begins
one use above the last that left, as in GreedyDual: from 0 on it would be the next to leave.
"""

from __future__ import annotations

import heapq

from ragjax.cache.node import Node
from ragjax.cache.policy.craft import reuse_of


class Variants:
    def __init__(self, limit: int):
        self._limit = limit
        self._reuse: dict[Node, float] = {}
        self._heap: list[tuple[float, int, Node]] = []
        self._serial = 0
        self._start = 0.0

    def __len__(self) -> int:
        return len(self._reuse)

    @property
    def full(self) -> bool:
        if len(self._reuse) >= self._limit:  # variants that left the tree by themselves no longer count; O(limit)
            self._reuse = {node: reuse for node, reuse in self._reuse.items() if not node.dead}
        return len(self._reuse) >= self._limit

    def reuse(self, node: Node) -> float:
        return self._reuse[node]

    def add(self, node: Node) -> None:
        self._reuse[node] = self._start
        self._push(node)

    def use(self, node: Node, cfo: float) -> None:
        """A request reuses a variant at this cache fixing overhead, in [0, 1]; one from disk counts from now on."""
        if node not in self._reuse:
            self.add(node)
        self._reuse[node] += reuse_of(cfo)

    def victim(self) -> Node | None:
        """The variant to leave next for a new one, the least reused that nobody uses now; None if there is room."""
        if self.full:
            self._heap = [entry for entry in self._heap if entry[2] in self._reuse]
            heapq.heapify(self._heap)
        kept: list[Node] = []
        found = None
        while found is None and len(self._reuse) >= self._limit and self._heap:
            reuse, _, node = heapq.heappop(self._heap)
            if self._reuse[node] > reuse:
                self._push(node)
            elif node.pins or node.loading or node.edges:
                kept.append(node)
            else:
                found = node
                self._start = max(self._start, reuse + 1)
                del self._reuse[node]
        for node in kept:
            self._push(node)
        return found

    def _push(self, node: Node) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (self._reuse[node], self._serial, node))
