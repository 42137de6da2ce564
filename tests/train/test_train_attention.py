"""`train_attention` and its gradients against the dense definition and a float64 oracle, over random packed samples.

Shapes are a fixed handful, so that each is compiled once; contents are random. Padding is NaN throughout, in what goes
in and in the gradients that come back. A section plants bugs, to see that the comparison finds each of them.
"""

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
from jax import lax

from ragjax.kernels.attention.op import paged_interval_attention
from ragjax.kernels.device import Device
from ragjax.kernels.pages import Pages
from ragjax.kernels.rope import Rotation
from ragjax.kernels.table import PageTable, Rows
from ragjax.kernels.view import View
from tests.support.cases import HOPPER, SEEDS, budget
from tests.support.devices import assert_agreement
from tests.support.matrix import with_smoke
from tests.support.oracle import NEVER
from tests.support.packed import (
    SHAPES,
    TOLERANCE,
    XLA,
    Case,
    Sample,
    Shape,
    check,
    errors,
    make_case,
    oracle,
    random_cases,
    rich_case,
)
from train.attention.mask import Mask, Tiles, Tokens, visible
from train.attention.op import Backend, choose, train_attention

pytestmark = pytest.mark.slow

# ---------------------------------------------------------------------------------------------- the oracle


def test_oracle_is_the_derivative() -> None:
    """Central differences of the oracle's own forward, in directions at random."""
    case = make_case(Shape(8, 1, 2, 4, 4, tokens=24), [Sample("tree", [3, 4, 3, 4], 1.0)] * 2, True, 3)

    def loss(case: Case) -> float:
        out, lse, *_ = oracle(case)
        live = case.live_T & ~np.isneginf(lse[:, 0])
        return float((out * case.dout_THD)[live].sum() + (lse * case.dlse_TH)[live].sum())

    rng = np.random.default_rng(0)
    for name, slope in zip(("q_THD", "k_TKD", "v_TKD"), oracle(case)[2:], strict=True):
        x, way = getattr(case, name), rng.standard_normal(slope.shape)
        up, down = (loss(replace(case, **{name: x + step * way})) for step in (1e-5, -1e-5))
        np.testing.assert_allclose((up - down) / 2e-5, (slope * way).sum(), rtol=1e-8)


# ------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("name", with_smoke(SHAPES, "d24-g2"))
def test_xla_gradients_equal_the_dense_definition(name: str) -> None:
    random_cases(SHAPES[name], 25, lambda case: check(case, case.run(XLA), case.dense()))


@pytest.mark.parametrize("name", ["d24-g2", "d64-g3"])
def test_gradients_equal_the_oracle(name: str) -> None:
    def holds(case: Case) -> None:
        what = oracle(case)
        check(case, case.dense(), what)
        check(case, case.run(XLA), what)

    random_cases(SHAPES[name], 10, holds)


def test_rows_that_see_nothing_have_no_gradient() -> None:
    """Not padding: live tokens hidden from all, themselves included."""
    case = rich_case()
    blind = case.tokens["request"] == 3
    case.tokens["hide_from"][blind], case.tokens["hide_until"][blind] = 0, NEVER
    case.dout_THD[blind] = np.nan
    got = case.run(XLA)
    for x in (got[0], *got[2:]):
        assert not x[blind].any() and np.isfinite(x).all()
    assert np.isneginf(got[1][blind]).all()
    case.dout_THD[blind] = 1.0
    check(case, got, oracle(case))


def test_sample_is_the_same_packed_and_alone() -> None:
    case = rich_case()
    packed = case.run(XLA)
    for number in (1, 3, 5):
        others = case.tokens["request"] != number
        tokens = case.tokens | {"request": np.where(others, -1, number)}
        alone = replace(case, tokens=tokens).run(XLA)
        for x, y in zip(packed, alone, strict=True):
            np.testing.assert_allclose(x[~others], y[~others], atol=2e-6)


def test_equals_the_op_that_serves() -> None:
    """One sample seen as pages: the same output and LSE as `paged_interval_attention`."""
    shape = Shape(16, 2, 2, 16, 16, tokens=64)
    case = make_case(shape, [Sample("tree", [9, 13, 10, 12, 8, 12], 1.0)], False, 11)
    assert case.live_T.all()
    out, lse, *_ = case.run(XLA)
    tokens = case.to_kernel()
    page_S = jnp.arange(4, dtype=jnp.int32)
    zero_S, slots = jnp.zeros_like(page_S), (4, 16)
    hidden = (x.reshape(slots) for x in (tokens.index_T, tokens.hide_from_T, tokens.hide_until_T))
    entries = PageTable(page_S, zero_S, zero_S, *hidden)
    pool = (jnp.asarray(x.reshape(1, 4, 16, 2, 16).swapaxes(2, 3), jnp.float32) for x in (case.k_TKD, case.v_TKD))
    rows = Rows(tokens.index_T, jnp.zeros_like(tokens.index_T), jnp.zeros_like(tokens.index_T))
    rotation = Rotation.table(np.ones(8), 1)
    view = View.build(rows, Pages(*pool), 0, entries, rotation, scale=shape.scale, block_rows=16)
    served_out, served_lse = paged_interval_attention(jnp.asarray(case.q_THD, jnp.float32), view)
    np.testing.assert_allclose(out, served_out, atol=2e-6)
    np.testing.assert_allclose(lse, served_lse, atol=2e-6)


@pytest.mark.parametrize("remat", [False, True], ids=["saved", "recomputed"])
def test_layers_in_a_scan(remat: bool) -> None:
    """Gradients of weights through three layers, under scan and checkpoint, as of a plain loop of dense attention."""
    shape = SHAPES["d24-g2"]
    case = rich_case(shape)
    mask = Mask.build(case.to_kernel(), block_rows=shape.block_rows, block_keys=shape.block_keys)
    rng = np.random.default_rng(1)
    width, t = 20, shape.tokens
    out_width, kv_width = shape.kv_heads * shape.groups * shape.dim, shape.kv_heads * shape.dim
    sizes = [(width, out_width), (width, kv_width), (width, kv_width), (out_width, width)]
    weights = [jnp.asarray(rng.standard_normal((3, *size)) / size[0] ** 0.5, jnp.float32) for size in sizes]
    x_TE = jnp.asarray(rng.standard_normal((t, width)), jnp.float32)
    goal_TE = jnp.where(case.live_T[:, None], jnp.asarray(rng.standard_normal((t, width)), jnp.float32), 0.0)

    def layer(x_TE, weights, backend):  # type: ignore[no-untyped-def]
        q, k, v = (jnp.dot(x_TE, w, precision="highest").reshape(t, -1, shape.dim) for w in weights[:3])
        out, _ = train_attention(q, k, v, mask, scale=shape.scale, backend=backend)
        return x_TE + jnp.dot(out.reshape(t, -1), weights[3], precision="highest")

    def scanned(weights):  # type: ignore[no-untyped-def]
        step = functools.partial(layer, backend="xla")
        step = jax.checkpoint(step) if remat else step
        return (lax.scan(lambda x, w: (step(x, w), None), x_TE, weights)[0] * goal_TE).sum()

    def looped(weights):  # type: ignore[no-untyped-def]
        x = x_TE
        for i in range(3):
            x = layer(x, [w[i] for w in weights], "reference")
        return (x * goal_TE).sum()

    for got, what in zip(jax.jit(jax.grad(scanned))(weights), jax.jit(jax.grad(looped))(weights), strict=True):
        assert np.linalg.norm(got - what) <= 4e-6 * np.linalg.norm(what)


# ------------------------------------------------------------------------------------- memory and skipping


def peak_bytes(t: int) -> int:
    def grad(q, k, v, tokens):  # type: ignore[no-untyped-def]
        mask = Mask.build(tokens)
        return jax.grad(lambda *x: train_attention(*x, mask, scale=0.2)[0].sum(), (0, 1, 2))(q, k, v)

    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    tokens = Tokens(*[jax.ShapeDtypeStruct((t,), jnp.int32)] * 4)
    analysis = jax.jit(grad).lower(of((t, 2, 32)), of((t, 1, 32)), of((t, 1, 32)), tokens).compile().memory_analysis()
    return int(analysis.temp_size_in_bytes)


def test_memory_of_the_gradient_grows_linearly() -> None:
    four, eight = peak_bytes(4 * 1024), peak_bytes(8 * 1024)
    assert 1.7 < eight / four < 2.3
    assert eight < (8 * 1024) ** 2 / 4


def test_lists_are_made_without_a_table_of_tokens_by_tokens() -> None:
    t = 32 * 1024
    tokens = Tokens(*[jax.ShapeDtypeStruct((t,), jnp.int32)] * 4)
    analysis = jax.jit(Mask.build).lower(tokens).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < t * t / 128


def test_hidden_tiles_are_skipped() -> None:
    """Keys that are NaN, though not padding, do not reach rows of other blocks, nor the gradients of those."""
    shape = Shape(16, 2, 2, 16, 16, tokens=80)
    index = np.arange(80)
    tokens = {"index": index, "request": 0 * index, "hide_from": 0 * index, "hide_until": 0 * index}
    case = replace(make_case(shape, [Sample("chain", [16] * 5, 1.0)], False, 0), tokens=tokens)
    middle = slice(16, 48)
    case.tokens["hide_from"][middle], case.tokens["hide_until"][middle] = 48, NEVER
    clean = case.run(XLA)
    for x in (case.k_TKD, case.v_TKD):
        x[middle] = np.nan
    case.dout_THD[middle] = case.dlse_TH[middle] = 0.0
    others = np.r_[0:16, 48:80]
    dirty = case.run(XLA)
    for x, y in zip(clean[:3], dirty[:3], strict=True):
        np.testing.assert_array_equal(x[others], y[others])
    for x in dirty[3:]:
        assert np.isfinite(x[48:]).all()


def tiles_of(mask: Mask) -> tuple[np.ndarray, np.ndarray]:
    """Which tiles `by_rows` and `by_keys` list: 0 no, 1 in part, 2 whole; each at most once."""

    def table(tiles: Tiles, shape: tuple[int, int]) -> np.ndarray:
        kind = np.zeros(shape, int)
        for n, (blocks, full, count) in enumerate(
            zip(*(np.asarray(x) for x in (tiles.block_NS, tiles.full_N, tiles.count_N)), strict=True)
        ):
            listed = blocks[:count]
            assert len(set(listed.tolist())) == count and full <= count
            kind[n, listed] = np.where(np.arange(count) < full, 2, 1)
        return kind

    shape = mask.by_rows.block_NS.shape
    return table(mask.by_rows, shape), table(mask.by_keys, shape[::-1]).T


@functools.partial(jax.jit, static_argnames=("block_rows", "block_keys"))
def built(tokens: Tokens, block_rows: int, block_keys: int) -> Mask:
    return Mask.build(tokens, block_rows=block_rows, block_keys=block_keys)


def seen_tiles(tokens: Tokens, block_rows: int, block_keys: int) -> np.ndarray:
    """Who sees whom, bool [N, B, S, C]."""
    t = tokens.index_T.shape[0]
    seen_TS = np.asarray(visible(jax.tree.map(lambda x: x[:, None], tokens), tokens))
    return seen_TS.reshape(t // block_rows, block_rows, t // block_keys, block_keys)


@pytest.mark.parametrize(("block_rows", "block_keys"), [(4, 2), (2, 4)])
@budget(100)
@given(st.integers(1, 3), st.integers(2, 12), st.booleans(), SEEDS)
def test_lists_hold_every_visible_tile(
    block_rows: int, block_keys: int, samples: int, indices: int, padded: bool, seed: int
) -> None:
    """Of tokens that are anything at all, in blocks so small that every edge of an interval is met."""
    rng = np.random.default_rng(seed)
    index, hide_from, hide_until = rng.integers(0, indices, (3, 48))
    hide_until += rng.integers(2)
    request = np.sort(rng.integers(-1 if padded else 0, samples, 48))
    index, request = np.sort(index), rng.choice([request, rng.permutation(request)])
    tokens = Tokens(*(jnp.asarray(x, jnp.int32) for x in (index, request, hide_from, hide_until)))
    by_rows, by_keys = tiles_of(built(tokens, block_rows, block_keys))
    np.testing.assert_array_equal(by_rows, by_keys)
    tiles = seen_tiles(tokens, block_rows, block_keys)
    assert (by_rows[tiles.any((1, 3))] > 0).all(), "a visible tile is left out"
    assert tiles.all((1, 3))[by_rows == 2].all(), "a tile that needs a mask goes without"


def test_lists_are_exact_where_blocks_are_of_one_sample() -> None:
    shape = Shape(16, 1, 1, 16, 8, tokens=128)
    case = make_case(
        shape, [Sample("isolated", [16, 16, 32, 16, 16], 1.0), Sample("tree", [8, 8, 8, 8], 1.0)], False, 0
    )
    assert case.live_T.all()
    by_rows, _ = tiles_of(built(case.to_kernel(), 16, 8))
    tiles = seen_tiles(case.to_kernel(), 16, 8)
    np.testing.assert_array_equal(by_rows, tiles.any((1, 3)).astype(int) + tiles.all((1, 3)))
    assert (by_rows == 2).any() and (by_rows == 1).any() and (by_rows == 0).sum() > by_rows.size / 2


# ------------------------------------------------------------------------------------- tests of the tests


def with_backward(change: Callable[..., tuple]) -> Backend:  # type: ignore[type-arg]
    """XLA with another backward pass: `change(correct, q, k, v, mask, scale, dout, lse, delta)`."""
    return Backend(XLA.forward, functools.partial(change, XLA.backward))


def forgets_delta(correct, q, k, v, mask, scale, dout, lse, delta):  # type: ignore[no-untyped-def]
    return correct(q, k, v, mask, scale, dout, lse, 0 * delta)


def ignores_intervals_in_dkv(correct, q, k, v, mask, *rest):  # type: ignore[no-untyped-def]
    zero_T = jnp.zeros_like(mask.tokens.index_T)
    open_tokens = replace(mask.tokens, hide_from_T=zero_T, hide_until_T=zero_T)
    causal = Mask.build(open_tokens, block_rows=mask.block_rows, block_keys=mask.block_keys)
    dq, _, _ = correct(q, k, v, mask, *rest)
    _, dk, dv = correct(q, k, v, causal, *rest)
    return dq, dk, dv


def takes_one_head_of_a_group(correct, q, k, v, mask, scale, dout, lse, delta):  # type: ignore[no-untyped-def]
    dq, _, _ = correct(q, k, v, mask, scale, dout, lse, delta)
    first_H = jnp.arange(q.shape[1]) % (q.shape[1] // k.shape[1]) == 0
    _, dk, dv = correct(q, k, v, mask, scale, jnp.where(first_H[:, None], dout, 0), lse, jnp.where(first_H, delta, 0))
    return dq, dk, dv


def masks_no_tile(correct, q, k, v, mask, *rest):  # type: ignore[no-untyped-def]
    eager = replace(mask.by_rows, full_N=mask.by_rows.count_N)
    return correct(q, k, v, replace(mask, by_rows=eager), *rest)


BUGS = [forgets_delta, ignores_intervals_in_dkv, takes_one_head_of_a_group, masks_no_tile]


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(bug: Callable[..., tuple]) -> None:  # type: ignore[type-arg]
    case = rich_case()
    what = oracle(case)
    assert max(errors(case.run(XLA), what).values()) <= TOLERANCE["float32"]
    assert max(errors(case.run(with_backward(bug)), what).values()) > 1e-2


# -------------------------------------------------------------------------------------- errors and dispatch


def test_backend_by_device(caplog: pytest.LogCaptureFixture) -> None:
    mask = Mask.build(Tokens(*(jnp.zeros(128, jnp.int32) for _ in range(4))))
    wide, odd = (jax.ShapeDtypeStruct((128, 4, dim), jnp.bfloat16) for dim in (128, 80))
    assert choose(wide, mask, HOPPER) == "triton"
    assert choose(wide, mask, Device("cpu")) == "xla"
    assert not caplog.records
    assert choose(odd, mask, HOPPER) == "xla"
    assert "head dimension 80" in caplog.text
    assert choose(wide, mask, Device("gpu", (7, 5))) == "xla"
    assert "compute capability 8.0, the device has 7.5" in caplog.text


# ------------------------------------------------------------------------------------------------ the mesh


SHARDED = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from train.attention.op import train_attention
from train.attention.mask import Mask, Tokens

rng = np.random.default_rng(0)
t = 64
index, request = np.r_[0:40, 0:24], np.r_[np.zeros(40), np.ones(20), -np.ones(4)]
numbers = index, request, rng.integers(0, 40, t), rng.integers(0, 40, t)
mask = Mask.build(Tokens(*(jnp.asarray(x, jnp.int32) for x in numbers)), block_rows=16, block_keys=16)
q, k, v, goal = (jnp.asarray(rng.standard_normal((t, heads, 8)), jnp.float32) for heads in (16, 8, 8, 16))
heads = P(None, "kv_heads", None)

def attend(q, k, v, mask):
    return train_attention(q, k, v, mask, scale=0.3)[0]

def loss(attend, q, k, v):
    return (attend(q, k, v, mask) * goal).sum()

results = []
for devices in (1, 8):
    mesh = jax.make_mesh((devices,), ("kv_heads",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = dict(in_specs=(heads, heads, heads, P()), out_specs=heads, check_vma=False)
    sharded = jax.shard_map(attend, mesh=mesh, **specs)
    put = [jax.device_put(x, jax.NamedSharding(mesh, heads)) for x in (q, k, v)]
    got = jax.jit(jax.value_and_grad(functools.partial(loss, sharded), (0, 1, 2)))(*put)
    assert len(got[1][1].addressable_shards) == devices
    results.append(jax.tree.leaves(got))
results.append(jax.tree.leaves(jax.jit(jax.value_and_grad(functools.partial(loss, attend), (0, 1, 2)))(q, k, v)))
for other in results[1:]:
    for x, y in zip(results[0], other, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
print("agree on", jax.device_count(), "devices")
"""


def test_eight_devices_agree_with_one() -> None:
    assert_agreement(SHARDED, devices=8)
