"""pyramidkv: SnapKV's scores, with more tokens in lower layers (PyramidKV, arXiv 2406.02069, section 4.2).

Budgets fall linearly from layer 0 to the last. With x = B - W beside the window: the last layer has x / beta, the first
2 x - x / beta, and their mean is x; beta is 20, as in the paper and in github.com/Zefan-Cai/KVCache-Factory. Where the
first would have more than the prompt, it has all of it and the last accordingly more (as there).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ragjax.compress import budget
from ragjax.compress.snapkv import SnapKV

BETA = 20.0
"""Mean budget beside the window, over that of the last layer."""


class PyramidKV(SnapKV):
    """SnapKV with a pyramid of budgets."""

    def budgets(
        self, layers: int, size: int, window: int, count: int, preference_L: NDArray[np.float32] | None = None
    ) -> NDArray[np.int32]:
        """See the module."""
        return budget.pyramid(layers, size, window, count, BETA)
