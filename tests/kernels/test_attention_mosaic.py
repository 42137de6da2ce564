"""The Mosaic GPU backend: in JAX's simulation of a GPU against the float64 oracle, and CUDA lowering.

The simulation has shared memory that starts as NaN, barriers whose every phase must be seen by their waiters, and a
thread for each warpgroup; copies complete at once, and it knows no layouts.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.kernels.attention import mosaic as attention_mosaic
from ragjax.kernels.device import Device
from ragjax.kernels.view import View
from tests.support.cases import FAR, HOPPER, KINDS, Case, Request, Shape, check, make_case
from tests.support.compiler import MOSAIC_CALL, Model, custom_calls, lower, production_call
from tests.support.matrix import few
from tests.support.oracle import Sizes

pytestmark = pytest.mark.slow

simulated = pytest.mark.compile
"""JAX 0.11 is the first whose simulation of a GPU can load registers from shared memory: `make test-gpu-compile`."""


@dataclass(frozen=True)
class Long(Shape):
    """Pieces may fill pages, so that there are full items."""

    @property
    def sizes(self) -> Sizes:
        return Sizes(page_size=self.page_size, pages=40, entries=48)

    @property
    def longest(self) -> int:
        return 150

    @property
    def most_requests(self) -> int:
        return min(2, self.rows // self.block_rows)


SHAPES = {
    "d128-p64-g4-b16-bfloat16": Long(128, 64, 1, 4, 16, 48, "bfloat16"),
    "d64-p64-g4-b32-bfloat16": Long(64, 64, 1, 4, 32, 96, "bfloat16", max_offset=FAR, scaled=True),
    "d64-p128-g7-b16-float16": Long(64, 128, 1, 7, 16, 32, "float16"),
    "d128-p128-g1-b64-bfloat16": Long(128, 128, 2, 1, 64, 64, "bfloat16"),
    "d128-p64-g2-b128-float16": Long(128, 64, 1, 2, 128, 128, "float16", scaled=True),
}
"""Blocks of one tile; of two; of two whose last quarter is no query's; of one with two KV heads; of two programs."""

CASES = 13
"""Of each shape; a hundred in a long run."""


def random_case(shape: Shape, seed: int) -> Case:
    rng = np.random.default_rng([seed, shape.dim, shape.page_size])

    def request() -> Request:
        lengths = rng.integers(1, shape.longest, rng.integers(1, 5)).tolist()
        return Request(str(rng.choice(sorted(KINDS))), lengths, bool(rng.random() < 0.7))

    return make_case(shape, [request() for _ in range(rng.integers(1, shape.most_requests + 1))], seed)


def rich_case(garbage: float = np.nan) -> Case:
    """Isolated chunks of two requests at equal indices, every row computed."""
    requests = [Request("isolated", [9, 70, 20, 8], True), Request("isolated", [20, 9, 66, 12], True)]
    shape = replace(SHAPES["d64-p64-g4-b32-bfloat16"], rows=256, max_offset=1000)
    return make_case(shape, requests, 5, garbage)


simulate = jax.jit(functools.partial(attention_mosaic.attend, interpret=True))


def run(case: Case) -> list[np.ndarray]:
    return [np.asarray(x) for x in simulate(case.q, case.view())]


# --------------------------------------------------------------------------------------------- oracle


@simulated
@pytest.mark.parametrize("cases", few([CASES, 100], [CASES]))
@pytest.mark.parametrize("name", SHAPES)
def test_mosaic_equals_oracle(name: str, cases: int) -> None:
    for seed in range(cases):
        case = random_case(SHAPES[name], seed)  # unused slots hold NaN
        check(case, *run(case))


def test_cases_hold_what_the_kernel_distinguishes() -> None:
    """Full and partial items, runs, more items than stages, empty lists, half-empty blocks."""
    seen: set[str] = set()
    for name, seed in itertools.product(SHAPES, range(CASES)):
        case = random_case(SHAPES[name], seed)
        blocks = jax.tree.map(np.asarray, case.view().blocks)
        for n, runs in enumerate(blocks.runs_N):
            ends = [0, *blocks.end_NU[n, :runs]]
            partial = blocks.partial_NU[n, :runs]
            indices = np.asarray(case.rows.index_T).reshape(len(blocks.runs_N), -1)[n]
            facts = {
                "full": any(partial > ends[:-1]),
                "partial": any(partial < ends[1:]),
                "both in a run": any((partial > ends[:-1]) & (partial < ends[1:])),
                "three runs": runs >= 3,
                "many items": ends[-1] > 6,
                "empty": runs == 0,
                "padding": runs > 0 and (indices < 0).any(),
            }
            seen |= {fact for fact, holds in facts.items() if holds}
    assert seen == {*facts}


@simulated
def test_nothing_to_see_gives_zeros() -> None:
    case = rich_case()
    entries = replace(case.layout.entries, request_S=jnp.full_like(case.layout.entries.request_S, -1))
    out, lse = run(replace(case, layout=replace(case.layout, entries=entries)))
    assert not out.any()
    assert np.isneginf(lse).all()


@simulated
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_output_has_the_dtype_of_the_query(dtype: str) -> None:
    case = rich_case()
    out, lse = run(replace(case, q=case.q.astype(dtype)))
    assert out.dtype == dtype and lse.dtype == np.float32
    worst_out, worst_lse = case.errors(out.astype(np.float32), lse)
    assert worst_out < 2e-2 and worst_lse < 2e-2


# ------------------------------------------------------------------------------------------- refusals


FITS = Shape(128, 64, 2, 4, 16, 32, "bfloat16")


@pytest.mark.parametrize(
    ("shape", "device", "reason"),
    [
        (FITS, HOPPER, None),
        (FITS, Device("gpu", (9, 0)), None),
        (replace(FITS, block_rows=64, rows=64, groups=1), HOPPER, None),
        (replace(FITS, block_rows=16, groups=7), HOPPER, None),
        (FITS, Device("cpu"), "not on cpu"),
        (FITS, Device("gpu", (8, 9)), "capability 9.0, the device has 8.9"),
        (FITS, Device("gpu", (10, 0)), "9.x, not 10.0"),
        (replace(FITS, dim=16), HOPPER, "head dim 16"),
        (replace(FITS, page_size=16), HOPPER, "page size 16"),
        (replace(FITS, dtype="float32"), HOPPER, "pool dtype float32"),
        (replace(FITS, dtype="uint16"), HOPPER, "pool dtype uint16"),
        (replace(FITS, block_rows=4), HOPPER, "block_rows 4"),
        (replace(FITS, block_rows=24, rows=24), HOPPER, "block_rows 24"),
        (replace(FITS, block_rows=96, rows=96), HOPPER, "block_rows 96"),
        (replace(FITS, block_rows=8), HOPPER, "do not fill the 64 rows"),
        (replace(FITS, block_rows=1, groups=64), HOPPER, "block_rows 1"),
    ],
)
def test_refusal_names_its_reason(shape: Shape, device: Device, reason: str | None) -> None:
    case = make_case(shape, [Request("chain", [3, 4], False)], 0)
    view = case.view()
    refusal = attention_mosaic.refusal(case.q, view, device)
    assert (refusal is None) if reason is None else (refusal is not None and reason in refusal)
    if reason and device == HOPPER:
        with pytest.raises(ValueError, match=reason):
            attention_mosaic.attend(case.q, view)


# ------------------------------------------------------------------------------------------- lowering


GROUPS = {1: 128, 3: 32, 4: 32, 7: 16, 8: 16}
"""Rows of a block by query heads of a KV head."""


@pytest.mark.parametrize("page_size", few([64, 128], [64]))
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", few(GROUPS, [4, 7], [4]))
def test_production_shapes_lower_for_cuda(group: int, dim: int, page_size: int) -> None:
    model = Model(4 * group, 4, dim)
    for rows, entries, dtype in ((2048, 128, "float16"), (32 * 1024, 1024, "bfloat16")):
        q_THD, view = production_call(
            model, page_size, rows=rows, block_rows=GROUPS[group], entries=entries, dtype=dtype
        )
        assert attention_mosaic.refusal(q_THD, view, HOPPER) is None
        for query_dtype in {dtype, "float32"} if entries == 128 else {dtype}:
            query = jax.ShapeDtypeStruct(q_THD.shape, jnp.dtype(query_dtype))
            lowered = lower(attention_mosaic.attend, query, view)
            assert [target for target, _ in custom_calls(lowered)].count(MOSAIC_CALL) == 1
            assert copies(lowered, view) == []


def copies(lowered: jax.stages.Lowered, view: View) -> list[str]:
    """Operations on the whole pool other than looking at it as a matrix and calling the kernel."""
    pool = "x".join(map(str, view.pages.k_LPKCD.shape))
    lines = [line for line in lowered.as_text().splitlines() if f"<{pool}x" in line]
    harmless = ("stablehlo.reshape", "func.func", "stablehlo.custom_call", "call @")
    return [line for line in lines if not any(word in line for word in harmless)]
