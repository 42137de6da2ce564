"""Policies by frequency of use: LFU, over the nodes that are kept or all that were ever asked for, and Cache-Craft's.

Cache-Craft: section 3.3 of arXiv:2502.15734.
"""

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


LOWEST_CFO = 0.01
"""A reuse that needs (almost) no fixing counts as much as this one."""


def reuse_of(cfo: float) -> float:
    """Addition to f_r for one use at this cache fixing overhead, in [0, 1]."""
    return 1 / max(cfo, LOWEST_CFO)


@POLICIES.register("craft")
class CraftPolicy(Policy):
    """The lowest f_r leaves first; each access adds 1 / CFO, so what needs little fixing stays. Note: f_r."""

    def on_access(self, node: Node, access: Access) -> None:
        node.note = (node.note or 0.0) + reuse_of(access.cfo)

    def score(self, node: Node, tier: Tier) -> float:
        return node.note or 0.0
