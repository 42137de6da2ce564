"""Masks: who sees whom, by the kernels' own rule."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.kernels import masks
from benchmarks.kernels.masks import Mask
from ragjax.core import NEVER
from tests.support.checks import seen

pytestmark = pytest.mark.slow


def some_masks() -> list[Mask]:
    cut = {"low": 24, "high": 60}
    return [
        masks.causal(256),
        masks.chunks(256, join=16, **cut),
        masks.tree(256, join=16, **cut),
        masks.graph(256),
        masks.recompute(256, 64, moved=False, **cut),
        masks.recompute(256, 64, moved=True, **cut),
        masks.patched(256, 50, 64, **cut),
        masks.decode(3, 128, moved=True, **cut),
    ]


@pytest.mark.parametrize("mask", some_masks(), ids=lambda m: m.name)
def test_visible_pairs_are_counted_right(mask: Mask) -> None:
    assert masks.visible_pairs(mask) == seen(mask).sum()
    assert masks.pairs(mask) >= masks.visible_pairs(mask) > 0
    assert (mask.offset_N.reshape(-1, 64) == mask.offset_N[::64, None]).all()  # a page has one offset


TREES = [masks.tree(256, low=12, high=40, join=16, seed=3), masks.graph(256, seed=3)]


@pytest.mark.parametrize("mask", TREES, ids=lambda m: m.name)
def test_what_a_row_of_a_tree_sees_is_one_path(mask: Mask) -> None:
    """Ancestors form a chain: of two keys that a row sees, the later one sees the earlier one."""
    got, join = seen(mask), int(mask.hide_until_N.max())
    widths = []
    for q in range(join):
        path = np.flatnonzero(got[q])
        assert path[-1] == q and path[0] == 0
        assert (got[np.ix_(path, path)] == np.tri(len(path), dtype=bool)).all()
        widths.append(len(path))
    assert got[join:, :join].all() and join < 256
    assert min(w / (q + 1) for q, w in enumerate(widths)) < 0.6 and got.sum() < 0.9 * 256 * 257 / 2


def test_chunks_see_the_system_prompt_and_themselves() -> None:
    mask = masks.chunks(512, low=32, high=64, join=64)
    got, ends = seen(mask), np.unique(mask.hide_from_N[mask.hide_from_N > 0])
    system = int(np.argmax(mask.hide_until_N > 0))
    chunk_N = np.searchsorted(ends, np.arange(512), side="right")
    for q in range(system, 448, 13):
        own = chunk_N[:448] == chunk_N[q]
        assert (got[q, system : q + 1] == own[system : q + 1]).all() and got[q, :system].all()
    assert got[448:, :448].all() and len(ends) > 4


def test_what_is_recomputed_stands_once() -> None:
    mask = masks.patched(256, 50, 64)
    live = mask.index_N[mask.index_N < NEVER]
    assert sorted(live) == list(range(256)) and np.isin(mask.index_T, mask.index_N[256:]).all()
    assert masks.visible_pairs(mask) == masks.visible_pairs(masks.recompute(256, 50, moved=True))


def test_offsets_move_chunks_from_behind_the_first() -> None:
    offset = masks.recompute(1024, 64, moved=True, low=100, high=200).offset_N
    assert offset[0] == 0 and (offset >= 0).all() and len(np.unique(offset)) > 3
    assert not masks.recompute(1024, 64, moved=False).offset_N.any()
