"""`paged_interval_attention` in XLA: blockwise online softmax over visible slots, for CPU and as the fallback.

Source: online softmax as in FlashAttention (arXiv 2205.14135). Memory is O(rows x tile); hidden slots are skipped.
A tile is a group of slots gathered side by side. The side that is smaller is rotated: the query, once per slot, for few
rows, the gathered keys for many. Products take the pool's dtype and accumulate in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ragjax.core import NEVER
from ragjax.kernels.pages import from_storage, to_storage
from ragjax.kernels.rope import Rotation, rotate
from ragjax.kernels.view import View

TILE = 8
"""Slots of a tile. Measured on two cores, 128 rows, 2K keys, 64 cells a page: 3.1 ms; one slot at a time 5.1 ms."""

REST = 2
"""Slots of a tile at the end of a block's list, where fewer than `TILE` are left."""

FEW = 8
"""Row blocks smaller than this rotate queries, larger ones keys."""


Arrays = tuple[jax.Array, ...]
Carry = TypeVar("Carry")


class Tile(NamedTuple):
    """Gathered keys: k, v [K, N, D] in compute dtype; who sees what, bool [B, N]; and the queries that fit the keys,
    [K, M, D] for all slots alike or [K, W, M, D] rotated for each slot.
    """

    q: jax.Array
    k_KND: jax.Array
    v_KND: jax.Array
    seen_BN: jax.Array


def attend(q_THD: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
    """See `attention.paged_interval_attention`."""
    t, heads, dim = q_THD.shape
    kv_heads, block_rows = view.pages.k_LPKCD.shape[2], view.block_rows

    def one_block(block: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_BHD, order_B, slot_S, count = block
        q_KMD = fold_heads(q_BHD.astype(jnp.float32) * view.scale, kv_heads)

        def step(entry_W: jax.Array, carry: Arrays) -> Arrays:
            return _accumulate(gather_tile(q_KMD, order_B, view, slot_S, count, entry_W), carry)

        m = q_KMD.shape[:2]
        start: Arrays = (jnp.zeros((*m, dim)), jnp.full(m, -jnp.inf), jnp.zeros(m))
        acc_KMD, max_KM, sum_KM = sweep(count, step, start)
        dead_KM = sum_KM == 0.0
        safe_KM = jnp.where(dead_KM, 1.0, sum_KM)
        lse_KM = jnp.where(dead_KM, -jnp.inf, max_KM + jnp.log(safe_KM))
        return unfold_heads(acc_KMD / safe_KM[..., None], block_rows), unfold_heads(lse_KM, block_rows)

    n = t // block_rows
    out_NBHD, lse_NBH = map_blocks(
        one_block,
        (
            q_THD.reshape(n, block_rows, heads, dim),
            view.rows.order_T.reshape(n, block_rows),
            view.blocks.slot_NS,
            view.blocks.count_N,
        ),
    )
    return out_NBHD.reshape(t, heads, dim).astype(q_THD.dtype), lse_NBH.reshape(t, heads)


def _accumulate(tile: Tile, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    acc_KMD, max_KM, sum_KM = carry
    logits_KMN = masked_logits(tile)
    new_KM = jnp.maximum(max_KM, logits_KMN.max(-1))
    safe_KM = jnp.where(jnp.isneginf(new_KM), 0.0, new_KM)
    prob_KMN = jnp.exp(logits_KMN - safe_KM[..., None])
    decay_KM = jnp.exp(max_KM - safe_KM)
    gain_KMD = dot(prob_KMN, tile.v_KND, ((2,), (1,)))
    return acc_KMD * decay_KM[..., None] + gain_KMD, new_KM, sum_KM * decay_KM + prob_KMN.sum(-1)


def sweep(count: jax.Array, step: Callable[[jax.Array, Carry], Carry], carry: Carry) -> Carry:
    """Run `step(entries, carry)` over the first `count` entries of a list, in tiles; the last may reach beyond."""

    def tiles(begin: jax.Array | int, number: jax.Array, width: int, carry: Carry) -> Carry:
        def tile(i: jax.Array, carry: Carry) -> Carry:
            return step(begin + i * width + jnp.arange(width, dtype=jnp.int32), carry)

        swept: Carry = lax.fori_loop(0, number, tile, carry)
        return swept

    whole = count // TILE
    carry = tiles(0, whole, TILE, carry)
    return tiles(whole * TILE, -(-(count - whole * TILE) // REST), REST, carry)


def gather_tile(
    q_KMD: jax.Array, order_B: jax.Array, view: View, slot_S: jax.Array, count: jax.Array, entry_W: jax.Array
) -> Tile:
    """A tile of a row block: these entries of its list of slots, their keys, and who sees what."""
    pages, slots, rotation = view.pages, view.slots, view.rotation
    slot_W = slot_S[jnp.minimum(entry_W, slot_S.shape[0] - 1)]
    page_W = slots.page_AS[0, slot_W]
    offset_W = slots.offset_AS[0, slot_W]
    # bits, not bfloat16, until the product: XLA on CPU would widen and narrow again around every operation
    k_KND = _load(pages.k_LPKCD, view.layer, page_W)
    v_KND = _load(pages.v_LPKCD, view.layer, page_W)
    order_N, hide_from_N, hide_until_N = (
        x[0, slot_W].reshape(-1) for x in (slots.order_ASC, slots.hide_from_ASC, slots.hide_until_ASC)
    )
    listed_N = jnp.repeat(entry_W < count, pages.page_size)
    order_N = jnp.where(listed_N, order_N, jnp.int32(NEVER))
    q_B1 = order_B[:, None]
    seen_BN = (order_N <= q_B1) & ~((hide_from_N <= q_B1) & (q_B1 < hide_until_N))
    # cells nobody sees may hold NaN, and 0 * NaN is NaN
    v_KND = jnp.where(seen_BN.any(0)[:, None], v_KND, jnp.zeros((), v_KND.dtype))
    if order_B.shape[0] < FEW:
        cos_WR, sin_WR = rotation.at(-offset_W)
        q_KWMD = rotate(q_KMD[:, None], cos_WR[:, None], sin_WR[:, None])
        return Tile(q_KWMD, from_storage(k_KND), from_storage(v_KND), seen_BN)
    k_KND = lax.cond((offset_W != 0).any(), _move_keys, lambda k, *_: k, k_KND, offset_W, rotation)
    return Tile(q_KMD, from_storage(k_KND), from_storage(v_KND), seen_BN)


def _move_keys(k_KND: jax.Array, offset_W: jax.Array, rotation: Rotation) -> jax.Array:
    cells = k_KND.shape[1] // offset_W.shape[0]
    cos_NR, sin_NR = (jnp.repeat(x, cells, axis=0) for x in rotation.at(offset_W))
    return to_storage(rotate(from_storage(k_KND).astype(jnp.float32), cos_NR, sin_NR), k_KND.dtype)


def _load(pool: jax.Array, layer: int | jax.Array, page_W: jax.Array) -> jax.Array:
    _, _, kv_heads, cells, dim = pool.shape
    parts = [lax.dynamic_slice(pool, (layer, page, 0, 0, 0), (1, 1, kv_heads, cells, dim))[0, 0] for page in page_W]
    return jnp.concatenate(parts, axis=1)


def masked_logits(tile: Tile) -> jax.Array:
    """Scaled logits, -inf where hidden, float32 [K, M, N]."""
    b, n = tile.seen_BN.shape
    kv_heads, m = tile.q.shape[0], tile.q.shape[-2]
    if tile.q.ndim == 3:
        logits = dot(tile.q, tile.k_KND, ((2,), (2,)))
    else:
        k_KWCD = tile.k_KND.reshape(*tile.q.shape[:2], -1, tile.k_KND.shape[-1])
        logits = dot(tile.q, k_KWCD, ((3,), (3,)), batch=(0, 1)).swapaxes(1, 2)
    return jnp.where(tile.seen_BN, logits.reshape(kv_heads, m // b, b, n), -jnp.inf).reshape(kv_heads, m, n)


def dot(
    x: jax.Array, y: jax.Array, contract: tuple[tuple[int, ...], tuple[int, ...]], batch: tuple[int, ...] = (0,)
) -> jax.Array:
    """Product batched over leading axes (KV heads first) in y's dtype, accumulated in float32."""
    return lax.dot_general(
        x.astype(y.dtype),
        y,
        (contract, (batch, batch)),
        precision=lax.Precision.HIGHEST if y.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def fold_heads(x_BHD: jax.Array, kv_heads: int) -> jax.Array:
    """[B, H, D] to [K, G*B, D]: rows of one KV head side by side, so that its keys are read once (GQA)."""
    b, heads, dim = x_BHD.shape
    return x_BHD.reshape(b, kv_heads, heads // kv_heads, dim).transpose(1, 2, 0, 3).reshape(kv_heads, -1, dim)


def unfold_heads(x_KM: jax.Array, block_rows: int) -> jax.Array:
    """[K, G*B, ...] back to [B, H, ...]."""
    kv_heads, _, *rest = x_KM.shape
    return jnp.moveaxis(x_KM.reshape(kv_heads, -1, block_rows, *rest), 2, 0).reshape(block_rows, -1, *rest)


def map_blocks(f: Callable[[Arrays], tuple[jax.Array, jax.Array]], xs: Arrays) -> tuple[jax.Array, jax.Array]:
    """Map over row blocks one after another; a single block is called plainly, which XLA fuses better."""
    if xs[0].shape[0] > 1:
        mapped: tuple[jax.Array, jax.Array] = lax.map(f, xs)
        return mapped
    first, second = f(tuple(x[0] for x in xs))
    return first[None], second[None]
