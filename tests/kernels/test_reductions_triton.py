"""The Pallas-Triton scores in interpret mode against the float64 oracle; and what a GPU is given: they lower for CUDA
and compile for Hopper without spills, on tensor cores.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from ragjax.kernels.attention.op import paged_interval_attention
from ragjax.kernels.blocks import visible_blocks
from ragjax.kernels.reductions import triton as reductions_triton
from ragjax.kernels.reductions.op import restrict
from ragjax.kernels.view import View
from tests.support.cases import (
    FAR,
    HOPPER,
    SEED,
    SEEDS,
    Case,
    Request,
    Shape,
    budget,
    make_case,
    requests_of,
    rich_case,
)
from tests.support.compiler import MODELS, SHARED_BYTES, Kernel, Model, compile_kernel, kernels, lower, production_call
from tests.support.matrix import few
from tests.support.scores import (
    SEGMENTS,
    Labels,
    Scores,
    assert_near,
    by_segment,
    everybody,
    far_apart,
    labels_of,
    rolled_values,
    rotated,
    wanted,
)

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
    "name", few(SHAPES, ["d64-p16-g3-b2-far", "d64-p16-g2-b64", "d128-p32-g4-b2-bfloat16"], ["d64-p16-g3-b2-far"])
)
def test_kernels_equal_oracle(name: str) -> None:
    shape = SHAPES[name]

    @budget(6)
    @given(requests_of(shape), SEEDS)
    def holds(requests: list[Request], seed: int) -> None:
        case = make_case(shape, requests, seed)  # unused slots hold NaN
        labels = labels_of(case, seed)
        assert_near(scores_of(case, labels), wanted(case, labels), shape.dtype)

    holds()


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_equal_oracle_at_length(name: str) -> None:
    shape = SHAPES[name]

    @budget(150)
    @given(requests_of(shape), SEEDS)
    def holds(requests: list[Request], seed: int) -> None:
        case = make_case(shape, requests, seed)
        labels = labels_of(case, seed)
        assert_near(scores_of(case, labels), wanted(case, labels), shape.dtype)

    holds()


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


FAULTS = ("offset sign", "rows not chosen", "value norm of the wrong head", "rows and keys swapped", "padded heads")


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = rich_case(SHAPES["d64-p16-g3-b2-far"])
    rng = np.random.default_rng(SEED)
    labels = Labels(rng.random(48) < 0.5, rng.integers(0, 3, 48, np.int32), rng.integers(0, 3, (48, 16), np.int32))
    what = wanted(case, labels)
    if fault == "offset sign":
        name, found = "all_SC", scores_of(rotated(case), labels).all_SC
    elif fault == "rows not chosen":
        name, found = "plain_SC", scores_of(case, everybody(labels)).plain_SC
    elif fault == "value norm of the wrong head":
        name, found = "valued_SC", scores_of(rolled_values(case), labels).valued_SC
    elif fault == "rows and keys swapped":
        name, found = "segment_ZZ", scores_of(case, labels).segment_ZZ.T
    else:
        fold = reductions_triton.fold
        monkeypatch.setattr(
            reductions_triton,
            "_fold_lse",
            lambda lse, kv_heads, cut: fold(lse[..., None], kv_heads, cut)[..., 0] * 1.4427,
        )
        wrong = compiled.__wrapped__(case.q, case.view(), labels)
        name, found = "all_SC", np.asarray(wrong.all_SC)
    assert far_apart(found, getattr(what, name))


def test_a_group_wider_than_a_program_is_not_split() -> None:
    q, view = production_call(Model(128, 1, 64), 16, rows=16, block_rows=4, entries=8)
    cut = reductions_triton.tiling(q, view, HOPPER)
    assert (cut.rows, cut.groups, cut.parts) == (128, 128, 4)


# --------------------------------------------------------------------------------------- what a GPU is given

CALLS = {
    f"{model}-{page_size}-{rows}": (model, page_size, rows, block_rows)
    for model, page_size in (("llama-3-8b", 64), ("llama-3-8b", 128), ("qwen2.5-7b", 64), ("smollm2-135m", 64))
    for rows, block_rows in ((2048, 128), (512, 32), (8, 1))
}


def lowered(model: str, page_size: int, rows: int, block_rows: int, dtype: str = "bfloat16", segments: int = 64):  # type: ignore[no-untyped-def]
    q, view = production_call(MODELS[model], page_size, rows=rows, block_rows=block_rows, dtype=dtype)
    assert reductions_triton.refusal(q, view, HOPPER, segments) is None

    def both(q, lse, view: View, chosen_T, row_segment_T, key_segment_SC):  # type: ignore[no-untyped-def]
        lse, view = restrict(lse, view, chosen_T)
        scores = reductions_triton.key_scores(q, lse, view, valued=True)
        return scores, reductions_triton.row_segment_score(q, lse, view, row_segment_T, key_segment_SC, segments)

    shapes = [
        jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
        view,
        jax.ShapeDtypeStruct((rows,), jnp.bool_),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct(view.entries.index_SC.shape, jnp.int32),
    ]
    found: list[Kernel] = kernels(lower(both, q, *shapes))
    assert [kernel.name for kernel in found] == ["key_score", "row_segment_score"]
    return found


@pytest.mark.parametrize("call", CALLS)
def test_production_shapes_lower_for_cuda(call: str) -> None:
    for kernel in lowered(*CALLS[call]):
        assert kernel.ir.count("tt.dot") == (2 if kernel.name == "key_score" else 3)
        assert "atomic" not in kernel.ir


def test_float32_products_are_not_tf32() -> None:
    """As those of bfloat16 are marked, to no effect: so the mark can be seen."""
    for dtype, marked in (("float32", False), ("bfloat16", True)):
        for kernel in lowered("llama-3-8b", 64, 512, 32, dtype):
            assert ("inputPrecision = tf32" in kernel.ir) == marked


@pytest.mark.compile
@pytest.mark.parametrize("call", ["llama-3-8b-64-2048", "llama-3-8b-128-512", "smollm2-135m-64-512", "qwen2.5-7b-64-8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_hopper_code_fits(call: str, dtype: str) -> None:
    """No spills in bfloat16, whose products run on tensor cores; a few bytes in float32, whose do not."""
    for kernel in lowered(*CALLS[call], dtype):
        used = compile_kernel(kernel)
        assert used.spill_bytes <= (0 if dtype == "bfloat16" else 64), used
        assert used.shared_bytes <= SHARED_BYTES, used
        assert used.copies > 0, used
        few_rows = CALLS[call][2] == 8
        assert (used.mma if few_rows else used.wgmma) > 0 or dtype == "float32", used
