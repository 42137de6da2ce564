"""Which chunks the question attends to, found while layers run (Cache-Craft, section 3.2.2, eq. 15, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW = 3
"""Layers in a row that must agree (w; the paper names no value)."""


@dataclass(frozen=True)
class Focus:
    """The chunks in focus, and the layer after which they were known, counted from 1 (L*)."""

    chunks: frozenset[int]
    layer: int


def find_focus(inter_LZ: NDArray[np.floating], window: int = WINDOW) -> Focus | None:
    """The first set of chunks that the window's layers agree on; None if they never do.

    inter_LZ: attention that the question's tokens gave to each chunk in each layer so far, [layers, chunks].
    Fewer than three chunks are all in focus, from the start.
    """
    if inter_LZ.shape[1] < 3:
        return Focus(frozenset(range(inter_LZ.shape[1])), 0)
    sets = [_foremost(cumulated_Z) for cumulated_Z in np.cumsum(inter_LZ, axis=0, dtype=np.float64)]
    for layer in range(window, len(sets) + 1):
        if len(set(sets[layer - window : layer])) == 1:
            return Focus(sets[layer - 1], layer)
    return None


def _foremost(cumulated_Z: NDArray[np.float64]) -> frozenset[int]:
    """Lines 4 to 9 for one layer: cut the descending scores where the entropy of their gaps grows most.

    As printed, with indices from 1: i* is the i in [1, k - 2] with the largest -p log p of gap i + 1, and the top i*
    chunks are in focus. Chunks that no gap tells apart are all in focus.
    """
    order = np.argsort(-cumulated_Z, kind="stable")
    gap = -np.diff(cumulated_Z[order])
    if gap.sum() <= 0:
        return frozenset(range(len(order)))
    share = gap / gap.sum()
    growth = -share[1:] * np.log(np.where(share[1:] > 0, share[1:], 1.0))
    return frozenset(int(i) for i in order[: 1 + int(np.argmax(growth))])
