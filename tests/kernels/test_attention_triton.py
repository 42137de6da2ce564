"""The Pallas-Triton backend in interpret mode against the float64 oracle, and planted faults that must show.

What a GPU makes of it: tests/test_lowering.py (it lowers) and tests/test_compile.py (registers, tensor cores).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.core import Grid
from ragjax.kernels.attention import triton as attention_triton
from ragjax.kernels.blocks import Blocks
from ragjax.kernels.device import Device
from ragjax.kernels.view import View
from tests.support.cases import FAR, HOPPER, Case, Request, Shape, check, make_case, random_cases
from tests.support.matrix import few

pytestmark = [pytest.mark.slow, pytest.mark.optimised]

SHAPES = {
    "d64-p16-g4-b8": Shape(64, 16, 2, 4, 8, 32, scaled=True),
    "d64-p64-g2-b32": Shape(64, 64, 2, 2, 32, 64, max_offset=FAR),
    "d128-p16-g1-b1": Shape(128, 16, 2, 1, 1, 16),
    "d64-p16-g7-b4-bfloat16": Shape(64, 16, 1, 7, 4, 32, "bfloat16", scaled=True),
    "d128-p64-g4-b32-bfloat16": Shape(128, 64, 2, 4, 32, 64, "bfloat16", max_offset=FAR),
    "d128-p32-g3-b2-float16": Shape(128, 32, 1, 3, 2, 24, "float16"),
    "d64-p16-g2-b128": Shape(64, 16, 1, 2, 128, 256),
    "d64-p16-g20-b8": Shape(64, 16, 1, 20, 8, 16),
}
"""The last two have blocks of two programs."""

CUTS: dict[str, Callable[[attention_triton.Tiling], attention_triton.Tiling]] = {
    "as chosen": lambda cut: cut,
    "one split": lambda cut: replace(cut, splits=1),
    "three splits": lambda cut: replace(cut, splits=3),
}
SPLIT = [("d64-p16-g4-b8", "one split", 6), ("d64-p16-g7-b4-bfloat16", "three splits", 6)]
"""What is tried with every change, with all shapes as they are chosen."""


def attend(case: Case, cut: str = "as chosen", change: Callable[[View], View] = lambda view: view):  # type: ignore[no-untyped-def]
    """Run a case; `change` alters the view, as a fault in a kernel would."""
    return [np.asarray(x) for x in compiled(case.q, change(case.view()), cut=cut)]


@functools.partial(jax.jit, static_argnames="cut")
def compiled(q, view, *, cut):  # type: ignore[no-untyped-def]
    chosen = CUTS[cut](attention_triton.tiling(q, view, HOPPER))
    return attention_triton.attend(q, view, cut=chosen, interpret=True)


@pytest.mark.parametrize(
    ("name", "cut", "examples"),
    few(
        [*itertools.product(SHAPES, CUTS, [6]), *((name, "as chosen", 200) for name in SHAPES)],
        [*((name, "as chosen", 6) for name in SHAPES), *SPLIT],
        [("d64-p16-g4-b8", "as chosen", 6)],
    ),
)
def test_triton_equals_oracle(name: str, cut: str, examples: int) -> None:
    random_cases(SHAPES[name], examples, lambda case, _: check(case, *attend(case, cut)))


def test_runs_are_found_by_bisection() -> None:
    end_U = np.array([3, 4, 9, 9, 12, 0, 7], np.int32)  # behind the runs anything may stand
    for runs in range(6):
        for item in range(14):
            found = attention_triton.runs_ended(end_U, jnp.int32(runs), jnp.int32(item))
            assert int(found) == (end_U[:runs] <= item).sum()


@pytest.mark.parametrize("dtype", few(["bfloat16", "float16"], ["float16"]))
def test_output_has_the_dtype_of_the_query(dtype: str) -> None:
    case = rich(SHAPES["d128-p64-g4-b32-bfloat16"])
    out, lse = attend(replace(case, q=case.q.astype(dtype)))
    assert out.dtype == dtype and lse.dtype == np.float32
    worst_out, worst_lse = case.errors(out.astype(np.float32), lse)
    assert worst_out < 2e-2 and worst_lse < 2e-2


def test_page_hidden_from_all_for_good_may_hold_anything() -> None:
    """A stale key is hidden by an interval up to the last index; its slot may have been given away since."""
    case = rich(SHAPES["d64-p16-g4-b8"], garbage=1.0)
    what = attend(case)
    entries, pages, layer = case.layout.entries, case.layout.pages, case.layout.layer
    first = int(np.flatnonzero(np.asarray(entries.request_S) < 0)[0])
    poisoned = [np.array(x) for x in (pages.k_LPKCD, pages.v_LPKCD)]
    free = np.setdiff1d(
        np.arange(case.shape.sizes.pages), np.asarray(entries.page_S)[np.asarray(entries.request_S) >= 0]
    )
    for pool in poisoned:
        pool[layer, free[0]] = 0.5
        pool[layer, free[0], :, 2] = np.nan
    index = np.array(entries.index_SC)
    index[first] = 2**30
    index[first, 2] = 0
    until = np.array(entries.hide_until_SC)
    until[first] = 2**30
    changed = replace(
        entries,
        page_S=entries.page_S.at[first].set(int(free[0])),
        request_S=entries.request_S.at[first].set(0),
        offset_S=entries.offset_S.at[first].set(0),
        index_SC=jnp.asarray(index),
        hide_from_SC=entries.hide_from_SC.at[first].set(0),
        hide_until_SC=jnp.asarray(until),
    )
    layout = replace(case.layout, entries=changed, pages=type(pages)(*map(jnp.asarray, poisoned)))
    got = attend(replace(case, layout=layout))
    for a, b in zip(got, what, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------ planted faults


def rich(shape: Shape, garbage: float = np.nan) -> Case:
    """Isolated chunks of two requests, long enough for full and partial items and several runs."""
    requests = [Request("isolated", [9, 20, 22, 18, 9], True), Request("isolated", [20, 21, 23, 14], True)]
    return make_case(
        replace(shape, rows=8 * shape.block_rows * (4 if shape.block_rows < 8 else 1)), requests, 5, garbage
    )


def one_run(blocks: Blocks) -> Blocks:
    """The whole list is taken for one run: the query is rotated by the first offset alone."""
    end = jnp.broadcast_to(blocks.count_N[:, None], blocks.end_NU.shape)
    return replace(blocks, runs_N=jnp.minimum(blocks.runs_N, 1), end_NU=end, partial_NU=jnp.zeros_like(end))


FAULTS: dict[str, Callable[[Blocks], Blocks]] = {
    "rotated once for all runs": one_run,
    "full too eager": lambda b: replace(b, partial_NU=b.end_NU),
    "last run left out": lambda b: replace(b, runs_N=jnp.maximum(b.runs_N - 1, 0)),
    "skip too eager": lambda b: replace(b, count_N=jnp.maximum(b.count_N - 1, 0), end_NU=b.end_NU - 1),
}
"""Lists that a kernel is given, as if it read them wrongly; what XLA reads too is in test_attention.py."""


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str) -> None:
    case = rich(SHAPES["d64-p16-g4-b8"], garbage=1.0)
    found = attend(case, change=lambda view: replace(view, blocks=FAULTS[fault](view.blocks)))
    worst_out, worst_lse = case.errors(*found)
    assert worst_out > 5e-2 and worst_lse > 5e-2


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("shape", "device", "reason"),
    [
        (Shape(64, 16, 2, 4, 8, 32), HOPPER, None),
        (Shape(64, 16, 2, 4, 8, 32), Device("cpu"), "cpu"),
        (Shape(64, 16, 2, 4, 8, 32), Device("gpu", (7, 5)), "compute capability 8.0"),
        (Shape(16, 16, 2, 4, 8, 32), HOPPER, "head dimension 16"),
        (Shape(64, 8, 2, 4, 8, 32), HOPPER, "pages of 8 slots"),
        (Shape(64, 16, 2, 4, 6, 36), HOPPER, "row blocks of 6"),
        (Shape(64, 16, 2, 4, 8, 32, "uint16"), HOPPER, "uint16"),
    ],
)
def test_refusal_names_its_reason(shape: Shape, device: Device, reason: str | None) -> None:
    case = make_case(shape, [Request("chain", [3, 4], False)], 0)
    refusal = attention_triton.refusal(case.q, case.view(), device)
    assert (refusal is None) if reason is None else (refusal is not None and reason in refusal)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 9, 16, 17, 32, 71, 128, 129])
def test_row_buckets_for_gpus_fill_programs(group: int) -> None:
    """One program each, or several where a group is wider than a program's share of a block that prefills."""
    for rows, block in (part for shape in Grid.gpu_rows(group) for part in shape.parts):
        assert rows % block == 0
        folded = block * 2 ** (group - 1).bit_length()
        assert (
            block == 1 or folded == attention_triton.MOST_ROWS or (block == 8 and folded > attention_triton.MOST_ROWS)
        )
