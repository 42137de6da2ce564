"""The policies that go by frequency of use alone, over the nodes that are kept or all that were ever asked for."""

from __future__ import annotations

from ragjax.cache.node import Node
from ragjax.cache.policy.base import POLICIES, Access, Lasting, Policy
from ragjax.core.tiers import Tier

_TICKS = 40
"""Bits of the tick below the frequency."""


@POLICIES.register("lfu")
class LFU(Policy):
    """The node with the fewest accesses leaves first; of equals, the one whose last access is longest ago.

    Note: frequency and tick of the last access as one whole number, which is the score too. A node that left every
    tier is forgotten, and with it its frequency.
    """

    def __init__(self) -> None:
        self._tick = 0

    def on_access(self, node: Node, access: Access) -> None:
        """Count, and stamp the node with a new tick."""
        self._tick += 1
        node.note = (((node.note or 0) >> _TICKS) + 1 << _TICKS) + self._tick

    def score(self, node: Node, tier: Tier) -> float:
        return node.note or 0


@POLICIES.register("lfu-perfect")
class PerfectLFU(Lasting, LFU):
    """LFU whose frequencies outlive the nodes: every access counts, whether the node was kept then or not."""

    def __init__(self) -> None:
        Lasting.__init__(self)
        LFU.__init__(self)

    def on_access(self, node: Node, access: Access) -> None:
        self._recall(node)
        LFU.on_access(self, node, access)
