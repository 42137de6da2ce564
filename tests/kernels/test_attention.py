"""`paged_interval_attention` against the float64 oracle, over random prompts, page layouts and row subsets.

Shapes are a fixed handful, so that each is compiled once; contents are random. The last section plants bugs, to see
that the comparison finds each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.kernels.attention.op import paged_interval_attention
from ragjax.kernels.attention.split import merge_states
from ragjax.kernels.blocks import visible_blocks
from ragjax.kernels.pages import Pages, to_storage, write_pages
from ragjax.kernels.table import PageTable, Rows, visible
from tests.support.cases import (
    KINDS,
    NARROW,
    SEED,
    SHAPES,
    TOLERANCE,
    WIDE,
    Case,
    Request,
    Shape,
    check,
    compiled,
    frequencies,
    make_case,
    random_cases,
    rich_case,
    rotation,
)
from tests.support.matrix import few, with_smoke
from tests.support.oracle import EMPTY, Keys, Piece, Queries, is_visible, keys_of, lay_out, lay_rows

pytestmark = pytest.mark.slow

# ----------------------------------------------------------------------------------------- the oracle


@pytest.mark.parametrize("examples", few([20, 200], [20]))
@pytest.mark.parametrize("name", with_smoke(SHAPES, "d16-p8-g2-b2", "d64-p16-g3-b8-bfloat16"))
def test_xla_equals_oracle(name: str, examples: int) -> None:
    random_cases(SHAPES[name], examples, lambda case, _: check(case, *case.run("xla")))


@pytest.mark.parametrize("name", ["d16-p8-g1-b1", "d64-p16-g4-b8", "d16-p8-g2-b1-bits", "d16-p16-g3-b8-capped"])
def test_reference_equals_oracle(name: str) -> None:
    random_cases(SHAPES[name], 20, lambda case, _: check(case, *case.run("reference")))


def test_isolated_chunk_is_the_chunk_behind_the_system_alone() -> None:
    """What isolation means, without the oracle's visibility: other chunks may be absent altogether."""
    shape = replace(NARROW, rows=48)
    full = [
        Piece(0, tuple(range(3)), 0, EMPTY, 0),
        Piece(0, tuple(range(3, 8)), 3, (8, 12), 1),
        Piece(0, tuple(range(8, 12)), 8, (12, 12), 2),
    ]
    keys = keys_of(full, shape.kv_heads, shape.dim, SEED)
    alone = [full[0], full[2]]
    keep = np.r_[0:3, 8:12]
    few = Keys(**{name: value[keep] for name, value in vars(keys).items()})
    rng = np.random.default_rng(SEED)
    indices = np.arange(8, 12)
    queries = Queries(0 * indices, indices, indices, rng.standard_normal((4, shape.kv_heads * shape.groups, shape.dim)))
    inv_freq_R = frequencies(shape.dim, shape.scaled)
    q, rows, place_T = lay_rows(queries, inv_freq_R, shape.block_rows, shape.rows)
    results = []
    for pieces, some in ((full, keys), (alone, few)):
        layout = lay_out(pieces, some, inv_freq_R, shape.sizes, max_offset=9)
        out, _ = Case(shape, pieces, some, queries, layout, q, rows, place_T).run()
        results.append(out[place_T])
    np.testing.assert_allclose(results[0], results[1], atol=1e-5)


def test_no_rows_by_keys_array() -> None:
    """Temporary memory stays below one byte per row and key."""
    t, s, c, d = 512, 512, 64, 16
    shapes = (
        jax.ShapeDtypeStruct((t, 2, d), jnp.float32),
        Rows(*(jax.ShapeDtypeStruct((t,), jnp.int32),) * 3),
        Pages(*(jax.ShapeDtypeStruct((1, 600, 1, c, d), jnp.float32),) * 2),
        0,
        PageTable(*(jax.ShapeDtypeStruct(x, jnp.int32) for x in (*((s,),) * 3, *((s, c),) * 3))),
        rotation(d, False, 100),
    )
    lowered = compiled.lower(*shapes, block_rows=128, backend="xla")
    assert lowered.compile().memory_analysis().temp_size_in_bytes < t * s * c


# -------------------------------------------------------------------------------------- states and pages


@pytest.mark.parametrize("shape", [NARROW, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("seed", range(6))
def test_parts_merge_to_the_whole(shape: Shape, seed: int) -> None:
    case = make_case(shape, [Request("tree", [3, 4, 5, 2, 3], True), Request("anything", [5, 7], True)], seed)
    entries = case.layout.entries
    left_S = np.random.default_rng(seed).random(entries.request_S.shape) < 0.5
    parts = [
        case.run(entries=replace(entries, request_S=jnp.where(mask, entries.request_S, jnp.int32(-1))))
        for mask in (left_S, ~left_S)
    ]
    out, lse = (np.asarray(x) for x in merge_states(*map(jnp.asarray, (*parts[0], *parts[1]))))
    worst_out, worst_lse = case.errors(out, lse)
    assert worst_out <= TOLERANCE["float32"][0]
    assert worst_lse <= TOLERANCE["float32"][1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16", "float16"])
def test_write_pages_writes_its_slots_alone(dtype: str) -> None:
    rng = np.random.default_rng(SEED)
    pool = Pages(*(to_storage(jnp.asarray(x, jnp.float32), jnp.dtype(dtype)) for x in rng.random((2, 3, 5, 2, 4, 8))))
    k_TKD, v_TKD = jnp.asarray(rng.random((2, 3, 2, 8)), jnp.float32)
    k_TKD, v_TKD = (jnp.concatenate([x, jnp.full((2, 2, 8), jnp.nan)]) for x in (k_TKD, v_TKD))
    slots = np.array([17, 4, 11, 20, 2**30], np.int32)  # the last two lie beyond the five pages of four
    wrote = write_pages(pool, 1, jnp.asarray(slots), k_TKD, v_TKD)
    k_TKD, v_TKD, slots = k_TKD[:3], v_TKD[:3], slots[:3]
    for before, after, new in ((pool.k_LPKCD, wrote.k_LPKCD, k_TKD), (pool.v_LPKCD, wrote.v_LPKCD, v_TKD)):
        what = np.array(before)
        what[1, slots // 4, :, slots % 4] = to_storage(new, jnp.dtype(dtype))
        np.testing.assert_array_equal(after, what)


# ------------------------------------------------------------------------------------------- visibility


def test_visible_is_the_rule() -> None:
    for seed, kind in enumerate(KINDS):
        case = make_case(WIDE, [Request(kind, [4, 7, 3, 5], False)] * 2, seed)
        seen = np.asarray(visible(case.rows, case.layout.entries))
        what = np.zeros_like(seen)
        for t in range(len(case.place_T)):
            for n in range(len(case.keys.index_N)):
                s, c = case.layout.entry_N[n], case.layout.slot_N[n]
                what[case.place_T[t], s, c] = is_visible(case.queries, case.keys, t, n)
        np.testing.assert_array_equal(seen, what)


def call(case: Case, backend: str = "xla", **changed: Any) -> Any:
    """The op outside of jit; `changed` are fields of the view, or q_THD."""
    q_THD = changed.pop("q_THD", case.q)
    return paged_interval_attention(q_THD, replace(case.view(), **changed), backend=backend)


# ------------------------------------------------------------------------------------------ planted bugs


def moved(change: Callable[[jax.Array], jax.Array], *names: str) -> Callable[[Case], dict[str, Any]]:
    def plant(case: Case) -> dict[str, Any]:
        entries = case.layout.entries
        return {"entries": replace(entries, **{name: change(getattr(entries, name)) for name in names})}

    return plant


def blind_to_requests(case: Case) -> dict[str, Any]:
    """Every live entry and row is of one request."""
    entries, rows = case.layout.entries, case.rows
    return {
        "entries": replace(entries, request_S=jnp.where(entries.request_S >= 0, jnp.int32(0), entries.request_S)),
        "rows": replace(rows, request_T=jnp.zeros_like(rows.request_T)),
    }


def values_from_keys(case: Case) -> dict[str, Any]:
    return {"pages": Pages(case.layout.pages.k_LPKCD, case.layout.pages.k_LPKCD)}


PLANTED: dict[str, Callable[[Case], dict[str, Any]]] = {
    "rotation sign": moved(lambda x: -x, "offset_S"),
    "no rotation": moved(jnp.zeros_like, "offset_S"),
    "offset off by one": moved(lambda x: x + 1, "offset_S"),
    "interval ignored": moved(jnp.zeros_like, "hide_from_SC", "hide_until_SC"),
    "less for less or equal": moved(lambda x: x + 1, "index_SC"),
    "own future seen": moved(lambda x: x - 1, "index_SC"),
    "wrong page": moved(lambda x: (x + 1) % 48, "page_S"),
    "hide_until one late": moved(lambda x: x + 1, "hide_until_SC"),
    "hide_until one early": moved(lambda x: x - 1, "hide_until_SC"),
    "hide_from one late": moved(lambda x: x + 1, "hide_from_SC"),
    "hide_from one early": moved(lambda x: x - 1, "hide_from_SC"),
    "request ignored": blind_to_requests,
    "values read from keys": values_from_keys,
}


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("shape", [NARROW, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("bug", [None, *PLANTED])
def test_planted_bug_is_found(bug: str | None, shape: Shape, backend: str) -> None:
    """Changing the inputs so is what the bug in a kernel would compute; slots are finite so that NaN does not tell."""
    case = rich_case(shape, garbage=1.0)
    out, lse = case.run(backend, **(PLANTED[bug](case) if bug else {}))
    worst_out, worst_lse = case.errors(out, lse)
    found = worst_out > 1e-2 and worst_lse > 1e-3
    if bug == "values read from keys":
        found = worst_out > 1e-2
    assert found == (bug is not None)


def test_truncated_block_list_is_found() -> None:
    case = rich_case(NARROW, garbage=1.0)
    blocks = visible_blocks(case.rows, case.layout.entries, NARROW.block_rows)
    short = replace(blocks, count_N=jnp.maximum(blocks.count_N - 1, 0))
    whole, cut = (call(case, blocks=b) for b in (blocks, short))
    assert case.errors(*map(np.asarray, whole))[0] <= TOLERANCE["float32"][0]
    assert case.errors(*map(np.asarray, cut))[0] > 1e-2
