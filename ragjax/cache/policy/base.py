"""What a replacement policy answers, and the queue of nodes that may leave.

The cache decides which nodes can leave (leaves nobody uses); a policy only orders them.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from ragjax.cache.tree import Node


class Policy(Protocol):
    """Orders nodes: the one with the lowest score leaves first."""

    def on_access(self, node: Node) -> None:
        """The node was admitted, or a request matched it."""

    def score(self, node: Node) -> float:
        """What the node is worth keeping; read when it becomes one that may leave."""


class Victims:
    """The nodes that may leave, lowest score first; O(log n) per call, stale entries dropped lazily.

    An entry is good while its serial number is the one its node remembers.
    """

    def __init__(self, policy: Policy):
        self._policy = policy
        self._heap: list[tuple[float, int, Node]] = []
        self._serial = 0
        self._live = 0

    def push(self, node: Node) -> None:
        """The node may leave, at the score it has now."""
        self.discard(node)
        self._serial += 1
        self._live += 1
        node.queued = self._serial
        heapq.heappush(self._heap, (self._policy.score(node), self._serial, node))
        if len(self._heap) > 2 * self._live + 64:
            self._heap = [entry for entry in self._heap if _good(entry)]
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        """The node may not leave (any more)."""
        self._live -= node.queued != 0
        node.queued = 0

    def pop(self) -> Node | None:
        """The node to leave next, which is no longer in the queue; None if there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if _good(entry):
                self.discard(entry[2])
                return entry[2]
        return None

    def nodes(self) -> set[Node]:
        """Every node that may leave; O(n), for audits."""
        return {entry[2] for entry in self._heap if _good(entry)}


def _good(entry: tuple[float, int, Node]) -> bool:
    return entry[2].queued == entry[1]
