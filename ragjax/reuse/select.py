"""Which tokens to recompute, once they have scores: pure NumPy, ties go to the earlier token."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Tokens


def share(ratio: float, tokens: int) -> int:
    """Tokens that a ratio in [0, 1] stands for: ceil(ratio * tokens), for what the ratio says in decimal."""
    return min(tokens, math.ceil(ratio * tokens - 1e-9))


def shares(raw_SN: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each row divided by its sum; zeros where that is 0."""
    sum_S1 = raw_SN.sum(1, keepdims=True)
    share_SN: NDArray[np.float64] = np.divide(raw_SN, sum_S1, out=np.zeros_like(raw_SN), where=sum_S1 > 0)
    return share_SN


def top(scores: NDArray[np.floating], candidates: Tokens, count: int) -> Tokens:
    """The `count` candidates (token indexes, ascending, int32 [n]) of highest score (float [n]), ascending."""
    best = np.argsort(-np.asarray(scores, np.float64), kind="stable")[:count]
    return candidates[np.sort(best)]
