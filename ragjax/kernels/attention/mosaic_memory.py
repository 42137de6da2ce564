"""Sizes, arrays and barriers of the Mosaic kernel: what its producer and its consumers share (`mosaic.py`).

Barriers. The producer and each consumer warpgroup walk the same list, item j using stage j mod `stages`.
  key_ready, value_ready [stage]: the TMA of an item's keys, values has landed; consumers wait once an item.
  slots_ready [stage]: three TMAs (index, hide_from, hide_until), for partial items alone; both sides know which.
  key_free, value_free [stage]: every consumer warpgroup has read them; the producer waits for the release of item
      j - stages before it fills item j, so never in a list's first `stages` items. Slots are read before the
      values are released, and refilled after value_free.
  run_ready, run_free [run mod 2]: likewise for the rotation of a run.
Each wait thus meets one completed phase, in order; a barrier is at most one phase ahead of its waiter, since its next
completion needs a copy that comes after that wait. At the end the producer drains the releases that no refill waited
for, so that every phase has been seen when the program ends. An empty list starts no copy and waits for none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ragjax.kernels.view import View

Ref = Any
Transforms = tuple[Any, ...]

TILE = 64
"""Folded rows of a consumer warpgroup: M of wgmma."""

SHARED_BYTES = 232448
"""Shared memory a program may use on compute capability 9.0."""


@dataclass(frozen=True)
class Sizes:
    block_rows: int
    heads: int
    kv_heads: int
    dim: int
    slots: int
    pages: int
    query_dtype: jnp.dtype
    dtype: jnp.dtype
    scale: float
    interpret: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def half(self) -> int:
        return self.dim // 2

    @property
    def tiles(self) -> int:
        """Tiles of a block's folded rows; the last may be filled up with rows that are computed and dropped."""
        return -(-self.block_rows * self.group // TILE)

    @property
    def consumers(self) -> int:
        """Consumer warpgroups of a program: two share each copy of keys and values, where the memory suffices."""
        return 2 if self.tiles > 1 and self._room(2) >= 2 else 1

    @property
    def programs(self) -> int:
        return -(-self.tiles // self.consumers)

    @property
    def stages(self) -> int:
        """Items of a list in shared memory at a time."""
        return min(4, self._room(self.consumers))

    @property
    def piece(self) -> int:
        """Rows of a tile that belong to one query head, side by side in memory."""
        return min(self.block_rows, TILE)

    @property
    def pieces(self) -> int:
        return TILE // self.piece

    def _room(self, consumers: int) -> int:
        """Stages that fit beside the queries of `consumers` tiles, two rotations and the barriers."""
        query = TILE * (self.dim * (self.query_dtype.itemsize + self.dtype.itemsize) + 4)
        stage = self.slots * (2 * self.dim * self.dtype.itemsize + 3 * 4)
        return (SHARED_BYTES - consumers * query - 2 * self.dim * 4 - 1024) // stage

    def place(self, tile: jax.Array, piece: int) -> tuple[jax.Array, jax.Array]:
        """The head within the group, and the first row within the block, of a piece of a tile."""
        row = tile * TILE + piece * self.piece
        return lax.div(row, jnp.int32(self.block_rows)), lax.rem(row, jnp.int32(self.block_rows))


class KernelInputs(NamedTuple):
    """In global memory. Keys and values are rows of one matrix: layer, page, KV head, slot."""

    q_THD: Ref
    index_NM: Ref
    high_N: Ref
    k: Ref
    v: Ref
    layer: Ref
    page_S: Ref
    offset_S: Ref
    index_SC: Ref
    hide_from_SC: Ref
    hide_until_SC: Ref
    cos_NR: Ref
    sin_NR: Ref
    entry_NS: Ref
    partial_NU: Ref
    end_NU: Ref
    runs_N: Ref


class Shared(NamedTuple):
    """In shared memory; leading axes are consumer warpgroups, stages or the two rotations."""

    q: Ref
    index: Ref
    rotated: Ref
    k: Ref
    v: Ref
    slots: Ref
    cos: Ref
    sin: Ref
    query_ready: Ref
    key_ready: Ref
    value_ready: Ref
    slots_ready: Ref
    run_ready: Ref
    key_free: Ref
    value_free: Ref
    run_free: Ref
    staging: Ref | None = None


class Program(NamedTuple):
    block: jax.Array
    kv_head: jax.Array


class RotationRun(NamedTuple):
    """Where a run's partial items begin, where it ends, and the offset of its entries."""

    partial: jax.Array
    end: jax.Array
    offset: jax.Array


def arguments(q_THD: jax.Array, view: View, folded: int) -> KernelInputs:
    rows, entries, blocks, pages = view.rows, view.entries, view.blocks, view.pages
    index_NB = rows.index_T.reshape(-1, view.block_rows)
    index_NM = jnp.tile(index_NB, (1, -(-folded // view.block_rows)))[:, :folded]
    dim = q_THD.shape[-1]
    return KernelInputs(
        q_THD=q_THD,
        index_NM=index_NM,
        high_N=index_NB.max(1),
        k=pages.k_LPKCD.reshape(-1, dim),
        v=pages.v_LPKCD.reshape(-1, dim),
        layer=jnp.asarray(view.layer, jnp.int32).reshape(1),
        page_S=entries.page_S,
        offset_S=entries.offset_S,
        index_SC=entries.index_SC,
        hide_from_SC=entries.hide_from_SC,
        hide_until_SC=entries.hide_until_SC,
        cos_NR=view.rotation.cos_NR,
        sin_NR=view.rotation.sin_NR,
        entry_NS=blocks.entry_NS,
        partial_NU=blocks.partial_NU,
        end_NU=blocks.end_NU,
        runs_N=blocks.runs_N,
    )


def scratch_of(sizes: Sizes) -> dict[str, Any]:
    """The fields of `Shared`, to be allocated; `staging` in interpret mode alone."""
    c, d, w, s = sizes.slots, sizes.dim, sizes.consumers, sizes.stages
    half = _tiled(sizes.half, sizes.dtype)  # halves of a head are rotated apart, so no tile may span both
    scratch = {
        "q": plgpu.SMEM((w, TILE, d), sizes.query_dtype, transforms=_tiled(sizes.half, sizes.query_dtype)),
        "index": plgpu.SMEM((w, TILE), jnp.int32),
        "rotated": plgpu.SMEM((w, TILE, d), sizes.dtype, transforms=half),
        "k": plgpu.SMEM((s, c, d), sizes.dtype, transforms=half),
        "v": plgpu.SMEM((s, c, d), sizes.dtype, transforms=_tiled(d, sizes.dtype)),
        "slots": plgpu.SMEM((s, 3, c), jnp.int32),
        "cos": plgpu.SMEM((2, sizes.half), jnp.float32),
        "sin": plgpu.SMEM((2, sizes.half), jnp.float32),
        "query_ready": plgpu.Barrier(num_arrivals=sizes.pieces + 1, num_barriers=w),
        "key_ready": plgpu.Barrier(num_barriers=s),
        "value_ready": plgpu.Barrier(num_barriers=s),
        "slots_ready": plgpu.Barrier(num_arrivals=3, num_barriers=s),
        "run_ready": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "key_free": plgpu.Barrier(num_arrivals=w, num_barriers=s),
        "value_free": plgpu.Barrier(num_arrivals=w, num_barriers=s),
        "run_free": plgpu.Barrier(num_arrivals=w, num_barriers=2),
    }
    if sizes.interpret:
        scratch["staging"] = plgpu.SMEM((w, TILE, c), sizes.dtype, transforms=_tiled(c, sizes.dtype))
    return scratch


def _tiled(columns: int, dtype: jnp.dtype) -> Transforms:
    """Tiles of 8 rows by at most 128 bytes, swizzled, as wgmma and TMA want them."""
    swizzle = min(128, columns * dtype.itemsize)
    return plgpu.TilingTransform((8, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle)


def bounds_of(inputs: KernelInputs, place: Program, u: jax.Array, begin: jax.Array) -> RotationRun:
    """Run u, which begins at item `begin`; after the last run, anything."""
    last = jnp.int32(inputs.entry_NS.shape[1] - 1)
    run = place.block, jnp.minimum(u, last)
    entry = inputs.entry_NS[place.block, jnp.minimum(begin, last)]
    return RotationRun(inputs.partial_NU[run], inputs.end_NU[run], inputs.offset_S[entry])


def produce(sizes: Sizes, inputs: KernelInputs, shared: Shared, place: Program) -> None:
    """Copy the rotation of each run and the keys, values and slots of each item, as room comes free."""
    first_page = inputs.layer[0] * sizes.pages

    def item(j: jax.Array, partial: jax.Array) -> jax.Array:
        entry = inputs.entry_NS[place.block, j]
        row = ((first_page + inputs.page_S[entry]) * sizes.kv_heads + place.kv_head) * sizes.slots
        slots = pl.ds(row, sizes.slots)
        stage = lax.rem(j, jnp.int32(sizes.stages))
        used = j >= sizes.stages
        _wait_if(used, shared.key_free.at[stage])
        plgpu.copy_gmem_to_smem(inputs.k.at[slots], shared.k.at[stage], shared.key_ready.at[stage])
        _wait_if(used, shared.value_free.at[stage])

        @pl.when(j >= partial)
        def _() -> None:
            for i, bounds in enumerate((inputs.index_SC, inputs.hide_from_SC, inputs.hide_until_SC)):
                plgpu.copy_gmem_to_smem(bounds.at[entry], shared.slots.at[stage, i], shared.slots_ready.at[stage])

        plgpu.copy_gmem_to_smem(inputs.v.at[slots], shared.v.at[stage], shared.value_ready.at[stage])
        return partial

    def run(u: jax.Array, begin: jax.Array) -> jax.Array:
        bounds = bounds_of(inputs, place, u, begin)
        parity = lax.rem(u, jnp.int32(2))
        angle = lax.abs(bounds.offset)
        _wait_if(u >= 2, shared.run_free.at[parity])
        plgpu.copy_gmem_to_smem(inputs.cos_NR.at[angle], shared.cos.at[parity], shared.run_ready.at[parity])
        plgpu.copy_gmem_to_smem(inputs.sin_NR.at[angle], shared.sin.at[parity], shared.run_ready.at[parity])
        lax.fori_loop(begin, bounds.end, item, bounds.partial)
        return bounds.end

    runs = inputs.runs_N[place.block]
    count = lax.fori_loop(0, runs, run, jnp.int32(0))
    _drain(count, sizes.stages, shared.key_free, shared.value_free)
    _drain(runs, 2, shared.run_free)


def _drain(count: jax.Array, size: int, *free: Ref) -> None:
    """Wait for the releases of the last `size` of `count` fills, which no refill waits for."""

    def wait(i: jax.Array, carry: None) -> None:
        for barrier in free:
            plgpu.barrier_wait(barrier.at[lax.rem(i, jnp.int32(size))])

    lax.fori_loop(jnp.maximum(count - size, 0), count, wait, None)


def _wait_if(condition: jax.Array, barrier: Ref) -> None:
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))
