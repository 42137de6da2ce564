"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from ragjax.schedule.order.base import Order, W, Waiting


class FCFS(Order):
    """The oldest."""

    def pick(self, queue: Sequence[W], last: Waiting | None) -> W:
        """It looks at nothing."""
        return queue[0]
