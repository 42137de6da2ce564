"""The cost profile: seconds of prefill by tokens cached and tokens computed, of one model on one device.

Between measurements as RAGCache has it (Algorithm 1, lines 6 to 9, arXiv:2404.12457).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """T(cached, new): seconds that a prefill of `new` tokens takes behind `cached` tokens whose KV is there."""

    cached: tuple[int, ...]  # ascending token counts from 0 on, at least two
    new: tuple[int, ...]  # ascending token counts from 1 on, at least two
    seconds: tuple[tuple[float, ...], ...]  # a row for each of `cached`, in it a positive figure for each of `new`
    measured_on: str = ""  # model, dtype and device, for people to read

    def cost(self, cached: int, new: int) -> float:
        """T(cached, new) in seconds; 0 for nothing new. O(log size).

        Bilinear within the grid. Outside, the nearest slot's line goes on; but more tokens never cost less than the
        edge of the grid, and fewer than the smallest `new` never less than their share of its cost.
        """
        if new == 0:
            return 0.0
        edge = min(cached, self.cached[-1]), min(max(new, self.new[0]), self.new[-1])
        if edge == (cached, new):
            return self._bilinear(cached, new)
        return max(self._bilinear(cached, new), self._bilinear(*edge) * min(1.0, new / self.new[0]))

    def _bilinear(self, cached: int, new: int) -> float:
        (row, across), (column, along) = _slot(self.cached, cached), _slot(self.new, new)
        near, far = self.seconds[row], self.seconds[row + 1]
        low = near[column] + across * (far[column] - near[column])
        high = near[column + 1] + across * (far[column + 1] - near[column + 1])
        return low + along * (high - low)


def _slot(counts: Sequence[int], at: int) -> tuple[int, float]:
    """Where the slot begins that holds `at`, or is nearest to it; and how far along it `at` lies."""
    slot = min(max(bisect_right(counts, at) - 1, 0), len(counts) - 2)
    return slot, (at - counts[slot]) / (counts[slot + 1] - counts[slot])
