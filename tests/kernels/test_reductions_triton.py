"""The Pallas-Triton scores in interpret mode against the float64 oracle. What a GPU makes of them: test_lowering.py
(they lower) and test_compile.py (registers, tensor cores).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.kernels.attention.op import paged_interval_attention
from ragjax.kernels.blocks import visible_blocks
from ragjax.kernels.reductions import triton as reductions_triton
from ragjax.kernels.reductions.op import restrict
from tests.support.cases import FAR, HOPPER, Case, Shape, random_cases, rich_case
from tests.support.compiler import Model, production_call
from tests.support.matrix import few
from tests.support.scores import SEGMENTS, Labels, Scores, assert_near, by_segment, labels_of, wanted

pytestmark = pytest.mark.slow

SHAPES = {
    "d64-p16-g4-b8": Shape(64, 16, 2, 4, 8, 32, scaled=True),
    "d64-p16-g3-b2-far": Shape(64, 16, 2, 3, 2, 24, max_offset=FAR),
    "d128-p64-g1-b32": Shape(128, 64, 2, 1, 32, 64),
    "d64-p16-g2-b64": Shape(64, 16, 1, 2, 64, 128),
    "d128-p32-g4-b2-bfloat16": Shape(128, 32, 1, 4, 2, 24, "bfloat16"),
}
"""The fourth has blocks of several programs, the second and the last groups that are padded."""


def measured(q, lse, view, labels):  # type: ignore[no-untyped-def]
    """All scores by the kernels, interpreted."""
    chosen_T, *segments = labels
    scores = functools.partial(reductions_triton.key_scores, q, interpret=True)
    counted = labels.row_segment_T >= 0, labels.row_segment_T < SEGMENTS
    row_TZ = reductions_triton.row_segment_score(
        q, *restrict(lse, view, counted[0] & counted[1]), *segments, SEGMENTS, interpret=True
    )
    segment_ZZ = by_segment(row_TZ, labels.row_segment_T)
    (all_SC,) = scores(*restrict(lse, view, None), valued=False)
    return Scores(all_SC, *scores(*restrict(lse, view, chosen_T), valued=True), row_TZ, segment_ZZ)


@jax.jit
def compiled(q, view, labels):  # type: ignore[no-untyped-def]
    return measured(q, paged_interval_attention(q, view)[1], view, labels)


def scores_of(case: Case, labels: Labels) -> Scores:
    found = compiled(case.q, case.view(), labels)
    return Scores(*(np.asarray(x) for x in found))


@pytest.mark.parametrize(
    ("name", "examples"),
    few(
        itertools.product(SHAPES, [6, 150]),
        [("d64-p16-g3-b2-far", 6), ("d64-p16-g2-b64", 6), ("d128-p32-g4-b2-bfloat16", 6)],
        [("d64-p16-g3-b2-far", 6)],
    ),
)
def test_kernels_equal_oracle(name: str, examples: int) -> None:
    def holds(case: Case, seed: int) -> None:
        labels = labels_of(case, seed)
        assert_near(scores_of(case, labels), wanted(case, labels), case.shape.dtype)

    random_cases(SHAPES[name], examples, holds)


def test_unused_entry_is_not_looked_up() -> None:
    """A program of an entry that no row block sees would read stray memory on a GPU; interpreted it would not show."""
    entries = rich_case(SHAPES["d64-p16-g4-b8"]).layout.entries
    page_S, offset_S = entries.page_S, entries.offset_S
    unused = np.asarray(entries.request_S) < 0
    stray = replace(entries, page_S=jnp.where(unused, 2**31 - 1, entries.page_S))
    found = np.asarray(reductions_triton._extents(stray, jnp.where(unused, 0, jnp.int32(7))))
    assert not found[unused].any()
    np.testing.assert_array_equal(found[~unused], np.stack([np.full_like(page_S, 7), page_S, offset_S], 1)[~unused])


def test_transposed_lists_are_the_lists() -> None:
    case = rich_case(SHAPES["d64-p16-g3-b2-far"])
    blocks = visible_blocks(case.rows, case.layout.entries, case.shape.block_rows)
    entry_NS, count_N = np.asarray(blocks.entry_NS), np.asarray(blocks.count_N)
    listed_NS = [set(entries[:n].tolist()) for entries, n in zip(entry_NS, count_N, strict=True)]
    block_SN, count_S = map(np.asarray, reductions_triton._transposed(blocks))
    for s in range(len(count_S)):
        assert block_SN[s, : count_S[s]].tolist() == [n for n, entries in enumerate(listed_NS) if s in entries]


def test_a_group_wider_than_a_program_is_not_split() -> None:
    q, view = production_call(Model(128, 1, 64), 16, rows=16, block_rows=4, entries=8)
    cut = reductions_triton.tiling(q, view, HOPPER)
    assert (cut.rows, cut.groups, cut.parts) == (128, 128, 4)
