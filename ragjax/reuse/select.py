"""Which tokens to recompute, once they have scores: pure NumPy, ties go to the earlier token."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def top_each(scores: NDArray[np.floating], candidates: Tokens, lengths: Sequence[int], counts: Sequence[int]) -> Tokens:
    """As `top`, for each of the consecutive parts of `lengths` candidates by itself, ascending."""
    cuts = np.cumsum(lengths)[:-1]
    parts = zip(np.split(np.asarray(scores), cuts), np.split(candidates, cuts), counts, strict=True)
    return np.concatenate([top(score, part, count) for score, part, count in parts])


def budgets(lengths: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` tokens (at most all) spread over parts in proportion to their lengths, by largest remainder."""
    total = sum(lengths)
    exact = [count * length / total for length in lengths]
    given = [math.floor(part + 1e-9) for part in exact]
    by_remainder = sorted(range(len(lengths)), key=lambda i: (given[i] - exact[i], i))
    for i in by_remainder[: count - sum(given)]:
        given[i] += 1
    return tuple(given)
