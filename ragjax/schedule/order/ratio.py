"""Cache-aware reordering (RAGCache, section 5.2): OrderPriority = cached length / computation length."""

from __future__ import annotations

from collections.abc import Sequence

from ragjax.schedule.order.base import Order, W, Waiting


class Ratio(Order):
    """Most cached for each token that is computed; of equals the oldest."""

    def pick(self, queue: Sequence[W], last: Waiting | None) -> W:
        """The highest priority; a request always computes its last token."""
        return max(queue, key=lambda waiting: (cached := waiting.cached) / (waiting.total - cached))
