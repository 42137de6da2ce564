"""The do-nothing twin: what a cache is worth whose policy learns nothing."""

from __future__ import annotations

from ragjax.cache.node import Node
from ragjax.cache.policy.base import POLICIES, Policy
from ragjax.core.tiers import Tier


@POLICIES.register("none")
class FIFO(Policy):
    """First in, first out, whatever is asked for. Note: the node's number in the queue of each tier (0: not there).

    A node's number is drawn when it is first asked for its score after it came into the tier.
    """

    def __init__(self) -> None:
        self._last = [0, 0]

    def score(self, node: Node, tier: Tier) -> float:
        """The node's number in the tier's queue."""
        return self._number(node, tier)

    def _number(self, node: Node, tier: Tier) -> int:
        if node.note is None:
            node.note = [0, 0]
        numbers: list[int] = node.note
        if not numbers[tier]:
            self._last[tier] += 1
            numbers[tier] = self._last[tier]
        return numbers[tier]

    def on_leave(self, node: Node, tier: Tier) -> None:
        """The node gives its number back."""
        if node.note is not None:
            node.note[tier] = 0

    def on_split(self, upper: Node, lower: Node, key: bytes) -> None:
        """Both halves came when the whole did."""
        if lower.note is not None:
            upper.note = list(lower.note)
