"""Variants of a chunk: KV computed behind other neighbours, N times M of them in total (Cache-Craft, section 3.3).

A chunk may have any number of variants as long as all chunks together keep to the limit. At the limit the one that was
reused least leaves before a new one is added, where reuse is f_r, the sum of 1/CFO over its uses. A new variant begins
one use above the last that left, as in GreedyDual: from 0 on it would be the next to leave.
"""

from __future__ import annotations

from ragjax.cache.node import Node
from ragjax.cache.policy.craft import reuse_of


class Variants:
    def __init__(self, limit: int):
        self._limit = limit
        self._reuse: dict[Node, float] = {}  # in the order in which they came
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

    def use(self, node: Node, cfo: float) -> None:
        """A request reuses a variant at this cache fixing overhead, in [0, 1]; one from disk counts from now on."""
        self._reuse[node] = self._reuse.get(node, self._start) + reuse_of(cfo)

    def victim(self) -> Node | None:
        """The variant to leave next for a new one: of the least reused that nobody uses now the oldest; O(limit).

        None if there is room, or all are in use.
        """
        if not self.full:
            return None
        idle = (node for node in self._reuse if not (node.pins or node.loading or node.edges))
        found = min(idle, key=self._reuse.__getitem__, default=None)
        if found is not None:
            self._start = max(self._start, self._reuse.pop(found) + 1)
        return found
