"""The producer warpgroup of the Mosaic kernel: it copies what the consumers read, by TMA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ragjax.kernels.attention.mosaic_memory import Inputs, Place, Ref, Shared, Sizes, bounds_of


def produce(sizes: Sizes, inputs: Inputs, shared: Shared, place: Place) -> None:
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
