"""Budgets: the number of tokens that each layer keeps. On the host, since they become shapes and pages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def equal(layers: int, size: int, count: int) -> NDArray[np.int32]:
    return np.full(layers, min(size, count), np.int32)


def pyramid(layers: int, size: int, window: int, count: int, beta: float) -> NDArray[np.int32]:
    """Budgets that fall linearly from the first layer to the last, `size` as their mean, int32 [L].

    Beside the window the last layer has (size - window) / beta, or more if the first cannot have its share.
    """
    if count <= size or layers == 1:
        return equal(layers, size, count)
    mean = size - window
    first = min(2 * mean - mean / beta, count - window)
    return window + fit(np.linspace(first, 2 * mean - first, layers), layers * mean, count - window)


def proportional(preference_L: NDArray[np.float32], size: int, window: int, count: int) -> NDArray[np.int32]:
    """Budgets beside the window in proportion to preferences, `size` as their mean, int32 [L].

    Equal ones where a preference is negative or no number, or none is above zero.
    """
    weight_L = np.asarray(preference_L, np.float64)
    layers = len(weight_L)
    weighable = np.isfinite(weight_L).all() and (weight_L >= 0).all() and weight_L.sum() > 0
    if count <= size or not weighable:
        return equal(layers, size, count)
    total = layers * (size - window)
    return window + fit(weight_L / weight_L.sum() * total, total, count - window)


def fit(wanted_L: NDArray[np.float64], total: int, most: int) -> NDArray[np.int32]:
    """Whole numbers near those wanted, none above `most`, that sum to `total` exactly, int32 [L].

    What is above `most` is spread equally over the others. Then each number is rounded down, and the largest remainders
    are rounded up, the lower layer first among equals.
    """
    if not 0 <= total <= most * len(wanted_L):
        raise ValueError(f"{len(wanted_L)} layers of {most} tokens cannot keep {total}")
    share_L = np.minimum(wanted_L, most).astype(np.float64)
    for _ in range(len(share_L)):
        free_L = share_L < most
        excess = total - share_L.sum()
        if excess <= 0 or not free_L.any():
            break
        share_L = np.where(free_L, np.minimum(share_L + excess / free_L.sum(), most), share_L)
    whole_L = np.floor(share_L + 1e-9).astype(np.int32)
    whole_L[np.argsort(whole_L - share_L, kind="stable")[: total - whole_L.sum()]] += 1
    return whole_L
