"""Cache-Craft's frequency of reuse (section 3.3, arXiv:2502.15734)."""

from __future__ import annotations

from ragjax.cache.node import Node
from ragjax.cache.policy.base import POLICIES, Access, Policy
from ragjax.core.tiers import Tier

LOWEST_CFO = 0.01
"""A reuse that needs (almost) no fixing counts as much as this one."""


def reuse_of(cfo: float) -> float:
    """What one use at this cache fixing overhead, in [0, 1], adds to f_r."""
    return 1 / max(cfo, LOWEST_CFO)


@POLICIES.register("craft")
class Craft(Policy):
    """The lowest f_r leaves first; each access adds 1 / CFO, so what needs little fixing stays. Note: f_r."""

    def on_access(self, node: Node, access: Access) -> None:
        """Add 1 / CFO."""
        node.note = (node.note or 0.0) + reuse_of(access.cfo)

    def score(self, node: Node, tier: Tier) -> float:
        """f_r."""
        return node.note or 0.0
