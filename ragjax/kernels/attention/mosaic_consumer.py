"""A consumer warpgroup of the Mosaic kernel: online softmax of one tile of folded rows, by wgmma."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ragjax.kernels.attention.mosaic_memory import (
    TILE,
    KernelInputs,
    Program,
    Ref,
    RotationRun,
    Shared,
    Sizes,
    bounds_of,
)

LOWEST = -1e30
"""Below every logit, yet finite: a row that has seen nothing then needs no case of its own."""

LOG2_E = math.log2(math.e)

MATRIX = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


class State(NamedTuple):
    """Online softmax in base 2: sum of weighted values [M, D], largest logit and sum of weights [M]."""

    acc: jax.Array
    peak: jax.Array
    total: jax.Array


def consume(
    sizes: Sizes, inputs: KernelInputs, shared: Shared, place: Program, warpgroup: jax.Array, out_THD: Ref, lse_NKM: Ref
) -> None:
    tile = lax.axis_index("program") * sizes.consumers + warpgroup
    q = shared.q.at[warpgroup]
    for i in range(sizes.pieces):
        head, row = sizes.place(tile, i)
        # rows that fill up the last tile take the last head's queries, so that each tile copies as many pieces
        source = _piece(sizes, inputs.q_THD, place, jnp.minimum(head, sizes.group - 1), row)
        plgpu.copy_gmem_to_smem(source, q.at[_rows_of_piece(sizes, i)], shared.query_ready.at[warpgroup])
    rows = pl.ds(tile * TILE, TILE)
    index_M = shared.index.at[warpgroup]
    plgpu.copy_gmem_to_smem(inputs.index_NM.at[place.block, rows], index_M, shared.query_ready.at[warpgroup])
    plgpu.barrier_wait(shared.query_ready.at[warpgroup])
    index = _load(index_M, PER_ROW)
    state = _walk(sizes, inputs, shared, place, warpgroup, index)
    dead = (state.total == 0.0) | (index < 0)
    total = jnp.where(dead, 1.0, state.total)
    lse_NKM[place.block, place.kv_head, rows] = jnp.where(dead, -jnp.inf, (state.peak + jnp.log2(total)) / LOG2_E)
    share = _across(jnp.where(dead, 0.0, 1.0 / total), (TILE, sizes.dim))
    q[...] = jnp.where(_across(dead, share.shape), 0.0, state.acc * share).astype(sizes.query_dtype)
    plgpu.commit_smem()
    for i in range(sizes.pieces):
        head, row = sizes.place(tile, i)
        target = _piece(sizes, out_THD, place, jnp.minimum(head, sizes.group - 1), row)
        pl.when(head < sizes.group)(functools.partial(plgpu.copy_smem_to_gmem, q.at[_rows_of_piece(sizes, i)], target))
    plgpu.wait_smem_to_gmem(0)


def _piece(sizes: Sizes, x_THD: Ref, place: Program, head: jax.Array, row: jax.Array) -> Ref:
    rows = pl.ds(place.block * sizes.block_rows + row, sizes.piece)
    return x_THD.at[rows, place.kv_head * sizes.group + head]


def _rows_of_piece(sizes: Sizes, i: int) -> Any:
    return pl.ds(i * sizes.piece, sizes.piece)


def _walk(
    sizes: Sizes, inputs: KernelInputs, shared: Shared, place: Program, warpgroup: jax.Array, index: jax.Array
) -> State:
    high = inputs.high_N[place.block]
    step = functools.partial(_step, sizes, shared, warpgroup, index, high)

    def run(u: jax.Array, carry: tuple[jax.Array, RotationRun, State]) -> tuple[jax.Array, RotationRun, State]:
        begin, bounds, state = carry
        following = bounds_of(inputs, place, u + 1, bounds.end)  # read a run ahead: nothing waits for global memory
        _rotate(sizes, shared, warpgroup, u, bounds.offset)
        state = lax.fori_loop(begin, bounds.partial, functools.partial(step, masked=False), state)
        state = lax.fori_loop(bounds.partial, bounds.end, functools.partial(step, masked=True), state)
        return bounds.end, following, state

    empty = State(_full((TILE, sizes.dim), 0.0, MATRIX), _full((TILE,), LOWEST, PER_ROW), _full((TILE,), 0.0, PER_ROW))
    first = jnp.int32(0)
    start = first, bounds_of(inputs, place, first, first), empty
    walked: tuple[jax.Array, RotationRun, State] = lax.fori_loop(0, inputs.runs_N[place.block], run, start)
    return walked[-1]


def _rotate(sizes: Sizes, shared: Shared, warpgroup: jax.Array, u: jax.Array, offset: jax.Array) -> None:
    """Rotate the queries by minus the offset of run u, scale them for exp2, and put them where wgmma reads them."""
    parity = lax.rem(u, jnp.int32(2))
    plgpu.barrier_wait(shared.run_ready.at[parity])
    factor = jnp.float32(sizes.scale * LOG2_E)
    signed = jnp.where(offset < 0, -factor, factor)  # the table holds positive angles
    size = (TILE, sizes.half)
    cos = _along(_load(shared.cos.at[parity], PER_COLUMN) * factor, size)
    sin = _along(_load(shared.sin.at[parity], PER_COLUMN) * signed, size)
    halves = pl.ds(0, sizes.half), pl.ds(sizes.half, sizes.half)
    x1, x2 = (_load(shared.q.at[warpgroup, :, half], MATRIX).astype(jnp.float32) for half in halves)
    rotated = shared.rotated.at[warpgroup]
    rotated[:, halves[0]] = (x1 * cos + x2 * sin).astype(sizes.dtype)
    rotated[:, halves[1]] = (x2 * cos - x1 * sin).astype(sizes.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(shared.run_free.at[parity])  # after the commit: TMA must not overtake the reads above


def _step(
    sizes: Sizes,
    shared: Shared,
    warpgroup: jax.Array,
    index: jax.Array,
    high: jax.Array,
    j: jax.Array,
    state: State,
    *,
    masked: bool,
) -> State:
    stage = lax.rem(j, jnp.int32(sizes.stages))
    k, v = shared.k.at[stage], shared.v.at[stage]

    plgpu.barrier_wait(shared.key_ready.at[stage])
    logits = _product(shared.rotated.at[warpgroup], k.transpose((1, 0)), sizes.slots)
    plgpu.barrier_arrive(shared.key_free.at[stage])
    if masked:
        plgpu.barrier_wait(shared.slots_ready.at[stage])
        logits = jnp.where(_seen(shared.slots.at[stage], index, logits.shape), logits, -jnp.inf)
    peak = jnp.maximum(state.peak, logits.max(axis=1))
    decay = jnp.exp2(state.peak - peak)
    weights = jnp.exp2(logits - _across(peak, logits.shape))
    total = state.total * decay + weights.sum(axis=1)
    acc = state.acc * _across(decay, state.acc.shape)
    plgpu.barrier_wait(shared.value_ready.at[stage])
    if masked:
        _clear(sizes, shared.slots.at[stage], v, high)
    acc = _weigh(sizes, shared, warpgroup, acc, weights.astype(sizes.dtype), v)
    plgpu.barrier_arrive(shared.value_free.at[stage])
    return State(acc, peak, total)


def _seen(slots: Ref, index: jax.Array, size: tuple[int, ...]) -> jax.Array:
    """Apply `table.sees` to rows and slots of one request."""
    key, hide_from, hide_until = (_along(_load(slots.at[i], PER_COLUMN), size) for i in range(3))
    row = _across(index, size)
    return (key <= row) & ((row < hide_from) | (row >= hide_until))


def _clear(sizes: Sizes, slots: Ref, v: Ref, high: jax.Array) -> None:
    """Zero the values of slots that no index up to the block's highest sees: they may hold NaN, and 0 * NaN is NaN.

    Each consumer warpgroup does it for itself. Both write the same: what is there, or zero.
    """
    for row in range(0, sizes.slots, TILE):
        rows = pl.ds(row, TILE)
        index, hide_from, hide_until = (_load(slots.at[i, rows], PER_ROW) for i in range(3))
        dead = (index > high) | ((hide_from <= index) & (hide_until > high))
        for column in range(0, sizes.dim, TILE):
            part = v.at[rows, pl.ds(column, TILE)]
            values = _load(part, MATRIX)
            part[...] = jnp.where(_across(dead, values.shape), jnp.zeros((), sizes.dtype), values)
    plgpu.commit_smem()


def _weigh(sizes: Sizes, shared: Shared, warpgroup: jax.Array, acc: jax.Array, weights: jax.Array, v: Ref) -> jax.Array:
    """Return acc + weights @ v. In interpret mode the left factor has to be in shared memory, and acc starts from 0."""
    if shared.staging is None:
        carried: jax.Array = pl.run_state(lambda ref: plgpu.wgmma(ref, weights, v))(plgpu.WGMMAAccumulatorRef.init(acc))
        return carried
    staging = shared.staging.at[warpgroup]
    staging[...] = weights
    plgpu.commit_smem()
    return acc + _product(staging, v, sizes.dim)


def _product(x: Ref, y: Ref, columns: int) -> jax.Array:
    def multiply(acc: Ref) -> Any:
        plgpu.wgmma(acc, x, y)
        return acc[...]

    product: jax.Array = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((TILE, columns), jnp.float32))
    return product


def _load(ref: Ref, layout: Any) -> jax.Array:
    loaded: jax.Array = plgpu.layout_cast(ref[...], layout)
    return loaded


def _full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    filled: jax.Array = plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
    return filled


def _across(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [0])


def _along(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [1])
