"""Cache-Craft's policy (section 3.3 of arXiv:2502.15734): KV that needs little fixing stays."""

from __future__ import annotations

from ragjax.cache.node import Node
from ragjax.cache.policy.base import POLICIES, Access, Policy
from ragjax.core.tiers import Tier

LOWEST_CFO = 0.01
"""A reuse that needs (almost) no fixing counts as much as this one."""


def reuse_of(cfo: float) -> float:
    """Addition to f_r for one use at this cache fixing overhead, in [0, 1]."""
    return 1 / max(cfo, LOWEST_CFO)


@POLICIES.register("craft")
class CraftPolicy(Policy):
    """The lowest f_r leaves first; each access adds 1 / CFO. Note: f_r."""

    def on_access(self, node: Node, access: Access) -> None:
        node.note = (node.note or 0.0) + reuse_of(access.cfo)

    def score(self, node: Node, tier: Tier) -> float:
        return node.note or 0.0
