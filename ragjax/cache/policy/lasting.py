"""Statistics that outlive a node: what a policy knows of nodes that left every tier (ghosts)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ragjax.cache.node import Node
from ragjax.cache.policy.base import Policy

GHOSTS_PER_NODE = 4
FEWEST, MOST = 10_000, 1_000_000
"""Ghosts that may be kept: four for each node that is kept, within these bounds."""


class Lasting(Policy):
    """Keeps the note of a node that left every tier, and gives it back when the node with this key returns.

    A node that comes back cut in other places has another key and starts without a note. Documents are cut at the
    segments of prompts, so they keep theirs; the parts of a question that splits do not.
    """

    def __init__(self) -> None:
        self._ghosts: OrderedDict[bytes, Any] = OrderedDict()
        self._kept = 0

    def _recall(self, node: Node) -> Any:
        """The note of an accessed node: its own, its ghost's, or None, and then the caller sets one."""
        if node.note is None:
            self._kept += 1
            node.note = self._ghosts.pop(node.key, None)
        return node.note

    def on_forget(self, node: Node) -> None:
        """The node's note becomes a ghost; the oldest ghosts make room."""
        if node.note is None:
            return
        self._kept -= 1
        self._ghosts[node.key], node.note = node.note, None
        while len(self._ghosts) > min(MOST, max(FEWEST, GHOSTS_PER_NODE * self._kept)):
            self._ghosts.popitem(last=False)

    def on_split(self, upper: Node, lower: Node, key: bytes) -> None:
        """Two nodes have notes where one had."""
        self._kept += upper.note is not None

    def on_merge(self, upper: Node, lower: Node, key: bytes) -> None:
        """One node has a note where two had."""
        self._kept -= upper.note is not None

    def on_clear(self) -> None:
        """No ghost remains (RAGCache, section 5.1: a count is reset upon cache clearance)."""
        self._ghosts.clear()
