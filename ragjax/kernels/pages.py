"""The pool of pages that keys and values live in: its arrays, their storage dtype, and writing to it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from ragjax.kernels.rope import Rotation, rotate


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """The pool: keys and values, [L, P, K, C, D] each (docs/dimension_key.md).

    dtype float32, float16, bfloat16, or uint16 holding bfloat16 bits: XLA on CPU would otherwise widen a whole
    bfloat16 array to float32 for every update of it.
    """

    k_LPKCD: jax.Array
    v_LPKCD: jax.Array

    @property
    def page_size(self) -> int:
        return int(self.k_LPKCD.shape[3])


def write_pages(pages: Pages, layer: int | jax.Array, slot_T: jax.Array, k_TKD: jax.Array, v_TKD: jax.Array) -> Pages:
    """Put new keys and values into slots (page * C + slot, int32 [T]) of one layer.

    Slots must differ from one another, also those beyond the pool, which are not written: padding rows name such. On
    CPU the pool must be donated for this to happen in place.
    """
    page_T, slot_T = slot_T // pages.page_size, slot_T % pages.page_size

    def put(pool: jax.Array, new_TKD: jax.Array) -> jax.Array:
        return pool.at[layer, page_T, :, slot_T, :].set(
            to_storage(new_TKD, pool.dtype), mode="drop", unique_indices=True
        )

    return Pages(put(pages.k_LPKCD, k_TKD), put(pages.v_LPKCD, v_TKD))


def move_slots(
    pages: Pages, source_N: jax.Array, target_N: jax.Array, offset_N: jax.Array, rotation: Rotation
) -> Pages:
    """Copy slots (page * C + slot, int32 [N]) over others in all layers, each key rotated by its RoPE offset.

    Keys are rotated in float32; an offset of 0 leaves them as they are. Target slots must differ from one another, also
    those beyond the pool, which are not written. On CPU the pool must be donated for this to happen in place.
    """
    cos_NR, sin_NR = rotation.at(offset_N)
    page_N, slot_N = source_N // pages.page_size, source_N % pages.page_size
    to_page_N, to_slot_N = target_N // pages.page_size, target_N % pages.page_size

    def put(pool: jax.Array, kept_NLKD: jax.Array) -> jax.Array:
        return pool.at[:, to_page_N, :, to_slot_N, :].set(kept_NLKD, mode="drop", unique_indices=True)

    k_NLKD, v_NLKD = (pool[:, page_N, :, slot_N, :] for pool in (pages.k_LPKCD, pages.v_LPKCD))
    rotated_NLKD = rotate(from_storage(k_NLKD).astype(jnp.float32), cos_NR[:, None, None], sin_NR[:, None, None])
    return Pages(put(pages.k_LPKCD, to_storage(rotated_NLKD, k_NLKD.dtype)), put(pages.v_LPKCD, v_NLKD))


def to_storage(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Cast to the pool's dtype (uint16: bfloat16 bits)."""
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(dtype)


def from_storage(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
