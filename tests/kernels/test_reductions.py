"""Layer-side sums against the float64 oracle: attention scores, deviation and neighbouring keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragjax.kernels.attention.op import paged_interval_attention
from ragjax.kernels.pages import Pages, from_storage
from ragjax.kernels.reductions import op as reductions_op
from ragjax.kernels.reductions import triton as reductions_triton
from ragjax.kernels.reductions.op import key_deviation, key_neighbours, key_scores, restrict
from ragjax.kernels.table import PageTable, Rows
from ragjax.kernels.view import View
from tests.support.cases import (
    HOPPER,
    NARROW,
    SEED,
    SEEDS,
    SHAPES,
    WIDE,
    Case,
    budget,
    random_cases,
    rich_case,
    rotation,
)
from tests.support.devices import assert_agreement
from tests.support.matrix import with_smoke
from tests.support.oracle import store
from tests.support.scores import (
    SEGMENTS,
    Labels,
    Recomputed,
    assert_near,
    everybody,
    far_apart,
    labels_of,
    measure,
    recomputed,
    rolled_values,
    rotated,
    scores_of,
    wanted,
)

pytestmark = pytest.mark.slow

# ---------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize(
    "name",
    with_smoke(
        ["d16-p8-g2-b2", "d16-p16-g3-b8", "d64-p64-g2-b32", "d16-p8-g2-b1-bits", "d16-p16-g3-b8-capped"], "d16-p8-g2-b2"
    ),
)
@pytest.mark.parametrize("backend", ["xla", "cpu"])
def test_scores_equal_oracle(name: str, backend: str) -> None:
    def holds(case: Case, seed: int) -> None:
        labels = labels_of(case, seed)
        assert_near(scores_of(case, labels, backend), wanted(case, labels), case.shape.dtype)

    random_cases(SHAPES[name], 15, holds)


def test_scores_are_shares_of_a_larger_context() -> None:
    """An LSE merged with that of other keys makes them smaller by the factor it says."""
    case = rich_case(WIDE)
    labels = labels_of(case, SEED)

    @jax.jit
    def doubled(q, view, labels):  # type: ignore[no-untyped-def]
        return measure(q, paged_interval_attention(q, view)[1] + jnp.log(2.0), view, labels, "xla")

    halves, wholes = doubled(case.q, case.view(), labels), scores_of(case, labels)
    for half, whole in zip(halves, wholes, strict=True):
        np.testing.assert_allclose(2 * half, whole, rtol=1e-5, atol=1e-6)


def test_row_blocks_that_do_not_count_visit_nothing() -> None:
    """They would read pages for nothing: their lists are empty, and the rest of the view is as it was."""
    case = rich_case(WIDE)
    view = case.view()
    chosen_T = np.zeros(48, bool)
    chosen_T[9] = True
    assert view.blocks.count_N[1] > 0
    lse_TH, fewer = restrict(jnp.zeros((48, 3)), view, jnp.asarray(chosen_T))
    only = np.arange(6) == 1
    np.testing.assert_array_equal(fewer.blocks.count_N, np.where(only, view.blocks.count_N, 0))
    np.testing.assert_array_equal(fewer.blocks.runs_N, np.where(only, view.blocks.runs_N, 0))
    assert fewer.entries is view.entries and fewer.blocks.entry_NS is view.blocks.entry_NS
    np.testing.assert_array_equal(np.isposinf(lse_TH).all(1), ~chosen_T)


FAULTS: dict[str, tuple[str, Callable[[Case, Labels], np.ndarray]]] = {
    "sum over heads for the mean": ("all_SC", lambda case, labels: 4 * scores_of(case, labels).all_SC),
    "entries out of place": ("all_SC", lambda case, labels: np.roll(scores_of(case, labels).all_SC, 1, axis=0)),
    "offset sign": ("all_SC", lambda case, labels: scores_of(rotated(case), labels).all_SC),
    "rows not chosen": ("plain_SC", lambda case, labels: scores_of(case, everybody(labels)).plain_SC),
    "rows not chosen, valued": ("valued_SC", lambda case, labels: scores_of(case, everybody(labels)).valued_SC),
    "no value norm": ("valued_SC", lambda case, labels: scores_of(case, labels).plain_SC),
    "value norm of the wrong head": (
        "valued_SC",
        lambda case, labels: scores_of(rolled_values(case), labels).valued_SC,
    ),
    "rows and keys swapped": ("segment_ZZ", lambda case, labels: scores_of(case, labels).segment_ZZ.T),
    "own token counted": ("segment_ZZ", lambda case, labels: own_token(case, labels, add_own=True)),
    "own token left out of all": ("segment_ZZ", lambda case, labels: own_token(case, labels, add_own=False)),
}


def own_token(case: Case, labels: Labels, *, add_own: bool) -> np.ndarray:
    """Segment score with the own token counted in the own segment, or left out of other segments too."""
    _, _, prob_THN = case.what()
    segment_ZZ = scores_of(case, labels).segment_ZZ.copy()
    of_row_T = labels.row_segment_T[case.place_T]
    of_key_N = labels.key_segment_SC[case.layout.entry_N, case.layout.slot_N]
    for t, n in np.argwhere(case.queries.index_T[:, None] == case.keys.index_N):
        a, b = of_row_T[t], of_key_N[n]
        if 0 <= a < SEGMENTS and 0 <= b < SEGMENTS and (a == b) == add_own:
            segment_ZZ[a, b] += prob_THN[t, :, n].mean() * (1 if add_own else -1)
    return segment_ZZ


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_scores_is_found(fault: str) -> None:
    case = rich_case(NARROW)
    rng = np.random.default_rng(SEED)
    labels = Labels(rng.random(48) < 0.5, rng.integers(0, 3, 48, np.int32), rng.integers(0, 3, (48, 8), np.int32))
    what = wanted(case, labels)
    assert_near(scores_of(case, labels), what, "float32")
    name, broken = FAULTS[fault]
    assert far_apart(broken(case, labels), getattr(what, name))


@pytest.mark.parametrize("kind", ["all_SC", "valued_SC", "row_TZ"])
def test_no_rows_by_keys_array(kind: str) -> None:
    """Temporary memory stays below one byte per row and key."""
    t, s, c, d = 512, 512, 64, 16

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def one(q, labels, where):  # type: ignore[no-untyped-def]
        view = View.build(*where, scale=d**-0.5, block_rows=128)
        return getattr(measure(q, paged_interval_attention(q, view)[1], view, labels, "xla"), kind)

    pool = jax.ShapeDtypeStruct((1, 600, 1, c, d), jnp.float32)
    entries = PageTable(ints(s), ints(s), ints(s), ints(s, c), ints(s, c), ints(s, c))
    where = Rows(ints(t), ints(t), ints(t)), Pages(pool, pool), 0, entries, rotation(d, False, 100)
    labels = Labels(jax.ShapeDtypeStruct((t,), jnp.bool_), ints(t), ints(s, c))
    lowered = jax.jit(one).lower(jax.ShapeDtypeStruct((t, 2, d), jnp.float32), labels, where)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < t * s * c


# ------------------------------------------------------------------------------------------- deviation


compiled_deviation = jax.jit(key_deviation)


def deviation(case: Case, new: Recomputed) -> np.ndarray:
    k_TKD, slot_T, offset_T = new.arguments
    found = compiled_deviation(k_TKD, replace(case.view(), rows=new.rows), slot_T, offset_T)
    assert found.dtype == np.float32
    return np.asarray(found)


@pytest.mark.parametrize(
    "name", with_smoke(["d16-p16-g3-b8", "d16-p8-g2-b1-bits", "d16-p8-g1-b2-float16"], "d16-p16-g3-b8")
)
def test_deviation_equals_oracle(name: str) -> None:
    def holds(case: Case, seed: int) -> None:
        new = recomputed(case, seed)
        found, what = deviation(case, new), new.want_T
        np.testing.assert_allclose(found, what, rtol=1e-4, atol=1e-8)
        assert not found[what == 0].any() or case.shape.dtype != "float32" or found[what == 0].max() < 1e-8

    random_cases(SHAPES[name], 15, holds)


def test_unchanged_token_deviates_by_nothing() -> None:
    case = rich_case(WIDE)
    _, slots_T, offset_T = recomputed(case, SEED).arguments
    slot_T = np.maximum(np.asarray(slots_T), 0)
    kept_TKD = case.layout.pages.k_LPKCD[case.layout.layer, slot_T // 16, :, slot_T % 16]
    view = replace(case.view(), rows=recomputed(case, SEED).rows)
    assert not np.asarray(compiled_deviation(kept_TKD, view, slots_T, 0 * offset_T)).any()


# ------------------------------------------------------------------------------------------ neighbours


def cosines(k_NKD: np.ndarray) -> np.ndarray:
    flat = np.asarray(k_NKD, np.float64).reshape(len(k_NKD), -1)
    length = np.linalg.norm(flat, axis=1)
    unit = flat / np.where(length > 0, length, 1)[:, None]
    return unit @ unit.T


@functools.partial(jax.jit, static_argnames=("count", "tile"))
def compiled_neighbours(k, valid, source, *, count, tile):  # type: ignore[no-untyped-def]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reductions_op, "KEY_TILE", tile)
        return key_neighbours(k, valid, source, count)


@pytest.mark.parametrize(("dtype", "tile"), [("float32", 16), ("float32", 1024), ("bfloat16", 16), ("uint16", 16)])
def test_neighbours_equal_sorted_cosines(dtype: str, tile: int) -> None:
    n, count = 41, 6

    @budget(15)
    @given(SEEDS, st.sampled_from([0.0, 0.1, 0.6, 0.9, 1.0]))
    def holds(seed: int, valid_share: float) -> None:
        rng = np.random.default_rng(seed)
        k = rng.standard_normal((n, 2, 8)) + rng.choice([0.0, 1.0])  # a shared part, or negative cosines too
        k = np.array(from_storage(store(k, dtype)), np.float32)
        valid = rng.random(n) < valid_share
        k[valid & (rng.random(n) < 0.1)] = 0
        source = rng.integers(-1, n, 7)
        cosine = cosines(k)
        k[~valid] = np.nan
        found = compiled_neighbours(store(k, dtype), valid, jnp.asarray(source, jnp.int32), count=count, tile=tile)
        assert found.cosine_IY.dtype == np.float32 and found.index_IY.dtype == np.int32
        for i, s in enumerate(source):
            others = [j for j in range(n) if valid[j] and j != s] if s >= 0 and valid[s] else []
            best = sorted(others, key=lambda j: -cosine[s, j])[:count]
            index, value = np.asarray(found.index_IY[i]), np.asarray(found.cosine_IY[i])
            np.testing.assert_array_equal(index[len(best) :], -1)
            np.testing.assert_array_equal(value[len(best) :], 0)
            assert len(set(index[: len(best)])) == len(best) and set(index[: len(best)]) <= set(others)
            np.testing.assert_allclose(value[: len(best)], np.maximum(cosine[s, best], 0), atol=1e-6)
            # cosines closer than rounding may change places
            np.testing.assert_allclose(cosine[s, index[: len(best)]], cosine[s, best], atol=1e-6)

    holds()


def test_ties_go_to_the_lower_index() -> None:
    """Across tiles too: small whole numbers, so that equal cosines are equal bits."""
    k = np.array([[3, 4], [4, 3], [0, 5], [4, 3]] * 10, np.float32)[:, None]
    found = compiled_neighbours(
        jnp.asarray(k), np.ones(40, bool), jnp.asarray([1, 4, 38], jnp.int32), count=12, tile=16
    )
    same = [j for j in range(40) if j % 2 and j != 1]
    np.testing.assert_array_equal(found.index_IY[0], same[:12])
    np.testing.assert_array_equal(found.index_IY[1], [0, *range(8, 40, 4), *[1, 3, 5]])
    np.testing.assert_array_equal(found.index_IY[2], [*range(2, 38, 4), *[0, 4, 8]])


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_no_sources_by_keys_array(dtype: str) -> None:
    """Nor a copy of the keys: temporary memory stays below an eighth of a byte per source and key."""
    sources, keys = 512, 2**17
    shapes = (
        jax.ShapeDtypeStruct((keys, 2, 64), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((keys,), jnp.bool_),
        jax.ShapeDtypeStruct((sources,), jnp.int32),
    )
    lowered = jax.jit(functools.partial(key_neighbours, count=64)).lower(*shapes)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < sources * keys / 8


# ------------------------------------------------------------------------------------ heads on many devices

SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from dataclasses import replace
from functools import partial
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from ragjax.kernels.attention.op import paged_interval_attention
from ragjax.kernels.pages import Pages
from ragjax.kernels.reductions.op import key_deviation
from tests.support import scores as t
from tests.support.cases import NARROW, rich_case

case = rich_case(NARROW)
labels = jax.tree.map(jnp.asarray, t.labels_of(case, 1))
view = case.view()
new = t.recomputed(case, 1)
k, slot, offset = new.arguments

def scores(q, pages):
    local = replace(view, pages=pages)
    found = t.measure(q, paged_interval_attention(q, local)[1], local, labels, "xla")
    return found, jax.tree.map(lambda x: lax.pmean(x, "kv_heads"), found)

def deviations(k, pages):
    local = replace(view, rows=new.rows, pages=pages)
    return lax.psum(key_deviation(k, local, slot, offset), "kv_heads")

mesh = jax.make_mesh((2,), ("kv_heads",), axis_types=(AxisType.Auto,))
heads, pool, own = P(None, "kv_heads", None), P(None, None, "kv_heads", None, None), P("kv_heads")
sharded = partial(jax.shard_map, mesh=mesh, check_vma=False)
own, means = jax.jit(sharded(scores, in_specs=(heads, pool), out_specs=(own, P())))(case.q, view.pages)
want = t.wanted(case, t.labels_of(case, 1))
t.assert_near(t.Scores(*map(np.asarray, means)), want, "float32")
assert all(t.far_apart(x[: len(y)], y) for x, y in zip(own, want))
found = jax.jit(sharded(deviations, in_specs=(heads, pool), out_specs=P()))(k, view.pages)
np.testing.assert_allclose(found, new.want_T, rtol=1e-4, atol=1e-8)
print("agree on", jax.device_count(), "devices")
"""


def test_devices_combine_as_the_docstrings_say() -> None:
    """Scores by their mean, deviations by their sum; a device's own score is another."""
    assert_agreement(SHARDED, devices=2)


# ------------------------------------------------------------------------------------------------ backends


@pytest.mark.parametrize(
    ("backend", "said"), [("cuda", "'cuda' is none of cpu, triton, xla"), ("triton", "it runs on GPUs")]
)
def test_backend_that_cannot_serve_is_refused(backend: str, said: str) -> None:
    case = rich_case(WIDE)
    with pytest.raises(ValueError, match=said):
        key_scores(case.q, jnp.zeros((48, 3)), case.view(), backend=backend)


def test_triton_refuses_with_a_reason() -> None:
    """Of shapes and dtypes alone, so that a caller can choose before there is data."""
    shape = replace(SHAPES["d64-p16-g4-b8"], rows=48)
    case = rich_case(shape)
    view = case.view()
    assert reductions_triton.refusal(case.q, view, HOPPER, 128) is None
    assert reductions_triton.refusal(case.q, view, HOPPER, 129) == "129 segments are more than 128"
    small = rich_case(replace(SHAPES["d16-p8-g2-b2"], rows=48))
    reason = reductions_triton.refusal(small.q, small.view(), HOPPER)
    assert reason is not None and "head dimension 16" in reason
