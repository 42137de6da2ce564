"""`train_attention` and its gradient in XLA, tile by tile, for CPU and as the fallback.

Source: FlashAttention-2, algorithms 1 and 2 (arXiv 2307.08691); hidden tiles are skipped, tiles seen whole are not
masked (FlashMask, arXiv 2410.01359). Blocks of rows follow one another, so the gradients of keys and values are summed
in place, in one sweep with that of the queries and always in the same sequence. Memory is O(tokens).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ragjax.kernels.attention.xla import accumulate, dot, empty, finish, fold_heads, unfold_heads
from train.attention.mask import Mask, Tokens, visible

Arrays = tuple[jax.Array, ...]
Sums = tuple[jax.Array, jax.Array, jax.Array]
Carry = TypeVar("Carry")


def forward(
    q_THD: jax.Array, k_TKD: jax.Array, v_TKD: jax.Array, mask: Mask, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `op.Backend`."""
    k_SKCD, v_SKCD = (_cut_keys(x, mask) for x in (k_TKD, v_TKD))

    def block(n: jax.Array) -> tuple[jax.Array, jax.Array]:
        q_KMD = _fold_rows(q_THD, n, mask, k_TKD)

        def visit(carry: Arrays, s: jax.Array, masked: bool) -> Arrays:
            return accumulate(_logits(q_KMD, k_SKCD[s], scale, _seen(mask, n, s) if masked else None), v_SKCD[s], carry)

        out_KMD, lse_KM = finish(_sweep(mask, n, visit, empty(q_KMD.shape)))
        return unfold_heads(out_KMD.astype(q_THD.dtype), mask.block_rows), unfold_heads(lse_KM, mask.block_rows)

    out_NBHD, lse_NBH = lax.map(block, _blocks(mask))
    return out_NBHD.reshape(q_THD.shape), lse_NBH.reshape(q_THD.shape[:2])


def backward(
    q_THD: jax.Array,
    k_TKD: jax.Array,
    v_TKD: jax.Array,
    mask: Mask,
    scale: float,
    dout_THD: jax.Array,
    lse_TH: jax.Array,
    delta_TH: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `op.Backend`."""
    k_SKCD, v_SKCD = (_cut_keys(x, mask) for x in (k_TKD, v_TKD))

    def block(sums: tuple[jax.Array, jax.Array], n: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        q_KMD, dout_KMD = (_fold_rows(x, n, mask, k_TKD) for x in (q_THD, dout_THD))
        lse_KM1, delta_KM1 = (_fold_rows(x[..., None], n, mask, k_TKD) for x in (lse_TH, delta_TH))

        def visit(carry: Sums, s: jax.Array, masked: bool) -> Sums:
            dq_KMD, dk_SKCD, dv_SKCD = carry
            seen_BC = _seen(mask, n, s) if masked else None
            prob_KMC = jnp.exp(_logits(q_KMD, k_SKCD[s], scale, seen_BC) - lse_KM1)
            slope_KMC = prob_KMC * (dot(dout_KMD, v_SKCD[s], ((2,), (2,))) - delta_KM1)
            return (
                dq_KMD + dot(slope_KMC, k_SKCD[s], ((2,), (1,))),
                dk_SKCD.at[s].add(dot(slope_KMC, q_KMD, ((1,), (1,)))),
                dv_SKCD.at[s].add(dot(prob_KMC, dout_KMD, ((1,), (1,)))),
            )

        dq_KMD, dk_SKCD, dv_SKCD = _sweep(mask, n, visit, (jnp.zeros(q_KMD.shape), *sums))
        return (dk_SKCD, dv_SKCD), unfold_heads((scale * dq_KMD).astype(q_THD.dtype), mask.block_rows)

    start = (jnp.zeros(k_SKCD.shape), jnp.zeros(v_SKCD.shape))
    (dk_SKCD, dv_SKCD), dq_NBHD = lax.scan(block, start, _blocks(mask))
    dk_TKD, dv_TKD = (x.swapaxes(1, 2).reshape(k_TKD.shape) for x in (scale * dk_SKCD, dv_SKCD))
    return dq_NBHD.reshape(q_THD.shape), dk_TKD.astype(k_TKD.dtype), dv_TKD.astype(v_TKD.dtype)


def _sweep(mask: Mask, n: jax.Array, visit: Callable[[Carry, jax.Array, bool], Carry], carry: Carry) -> Carry:
    """Run `visit(carry, key block, masked)` over the tiles of a row block: those seen whole, then those in part."""
    tiles = mask.by_rows

    def step(item: jax.Array, carry: Carry, *, masked: bool) -> Carry:
        return visit(carry, tiles.block_NS[n, item], masked)

    full, count = tiles.full_N[n], tiles.count_N[n]
    carry = lax.fori_loop(0, full, functools.partial(step, masked=False), carry)
    swept: Carry = lax.fori_loop(full, count, functools.partial(step, masked=True), carry)
    return swept


def _blocks(mask: Mask) -> jax.Array:
    return jnp.arange(mask.by_rows.count_N.shape[0], dtype=jnp.int32)


def _cut_keys(x_TKD: jax.Array, mask: Mask) -> jax.Array:
    """[T, K, D] to [S, K, C, D]."""
    return x_TKD.reshape(-1, mask.block_keys, *x_TKD.shape[1:]).swapaxes(1, 2)


def _fold_rows(x_THD: jax.Array, n: jax.Array, mask: Mask, k_TKD: jax.Array) -> jax.Array:
    """Block n of the rows, the query heads of a KV head side by side, [K, G*B, D]."""
    x_BHD = lax.dynamic_slice_in_dim(x_THD, n * mask.block_rows, mask.block_rows)
    return fold_heads(x_BHD, k_TKD.shape[1])


def _logits(q_KMD: jax.Array, k_KCD: jax.Array, scale: float, seen_BC: jax.Array | None) -> jax.Array:
    """Scaled logits of a tile, -inf where hidden, float32 [K, M, C]."""
    logits_KMC = scale * dot(q_KMD, k_KCD, ((2,), (2,)))
    if seen_BC is None:
        return logits_KMC
    shape = logits_KMC.shape
    return jnp.where(seen_BC, logits_KMC.reshape(shape[0], -1, *seen_BC.shape), -jnp.inf).reshape(shape)


def _seen(mask: Mask, n: jax.Array, s: jax.Array) -> jax.Array:
    """Visibility in a tile, bool [B, C]."""

    def cut(x_T: jax.Array, block: jax.Array, size: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(x_T, block * size, size)

    rows: Tokens = jax.tree.map(lambda x_T: cut(x_T, n, mask.block_rows)[:, None], mask.tokens)
    keys: Tokens = jax.tree.map(lambda x_T: cut(x_T, s, mask.block_keys), mask.tokens)
    return visible(rows, keys)
