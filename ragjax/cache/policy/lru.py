"""Least recently used."""

from __future__ import annotations

from ragjax.cache.node import Node
from ragjax.cache.policy.base import Access, Policy
from ragjax.core.tiers import Tier


class LRU(Policy):
    """The node whose last access is longest ago leaves first. Note: the tick of that access."""

    def __init__(self) -> None:
        self._tick = 0

    def on_access(self, node: Node, access: Access) -> None:
        """Stamp the node with a new tick."""
        self._tick += 1
        node.note = self._tick

    def score(self, node: Node, tier: Tier) -> float:
        """The tick of the last access."""
        return node.note or 0
