"""Longest prefix match (RadixAttention, arXiv 2312.07104; DepCache, section 6.4.2)."""

from __future__ import annotations

from collections.abc import Sequence

from ragjax.schedule.order import ORDERS, Order, W


@ORDERS.register("lpm")
class LPM(Order):
    """Most cached tokens; of equals the oldest."""

    def pick(self, queue: Sequence[W]) -> W:
        """The most of them, whatever else it computes."""
        return max(queue, key=lambda waiting: waiting.cached)
