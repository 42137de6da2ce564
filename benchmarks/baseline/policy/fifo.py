"""The do-nothing twin: what a cache is worth whose policy learns nothing."""

from __future__ import annotations

from ragjax.cache.node import Node
from ragjax.cache.policy.base import POLICIES, Access, Policy
from ragjax.core.tiers import Tier


@POLICIES.register("none")
class FIFO(Policy):
    """First in, first out, whatever is asked for. Note: the number of the node's first access."""

    def __init__(self) -> None:
        self._last = 0

    def on_access(self, node: Node, access: Access) -> None:
        if node.note is None:
            self._last += 1
            node.note = self._last

    def score(self, node: Node, tier: Tier) -> float:
        return node.note or 0
