"""Least recently used."""

from __future__ import annotations

from ragjax.cache.tree import Node


class LRU:
    """The node whose last access is longest ago leaves first."""

    def __init__(self) -> None:
        self._tick = 0

    def on_access(self, node: Node) -> None:
        """Stamp the node with a new tick."""
        self._tick += 1
        node.last_use = self._tick

    def score(self, node: Node) -> float:
        """The tick of the last access."""
        return node.last_use
