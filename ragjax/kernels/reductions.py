"""Sums over attention that selection methods need, blockwise from the LSE: no rows x keys array is formed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ragjax.kernels.attention_xla import fold_heads, gather_tile, masked_logits, sweep
from ragjax.kernels.view import View


def key_mass(q_THD: jax.Array, lse_TH: jax.Array, view: View) -> jax.Array:
    """Attention probability that each key receives, summed over the rows and averaged over query heads.

    Arguments as `attention.paged_interval_attention`, with the LSE it returned. float32 [S, C].
    """
    t, heads, dim = q_THD.shape
    kv_heads, cells = view.pages.k_LPKCD.shape[2:4]
    slot_count = view.slots.request_S.shape[0]
    n = t // view.block_rows

    def one_block(mass_SC: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        q_BHD, lse_BH, order_B, slot_S, count = block
        q_KMD = fold_heads(q_BHD.astype(jnp.float32) * view.scale, kv_heads)
        lse_KM1 = fold_heads(lse_BH[..., None], kv_heads)
        safe_KM1 = jnp.where(jnp.isneginf(lse_KM1), 0.0, lse_KM1)

        def step(entry_W: jax.Array, mass_SC: jax.Array) -> jax.Array:
            tile = gather_tile(q_KMD, order_B, view, slot_S, count, entry_W)
            prob_KMN = jnp.exp(masked_logits(tile) - safe_KM1)
            sums_WC = prob_KMN.sum((0, 1)).reshape(-1, cells) / heads
            # entries behind the list's end are fully hidden and add zeros to whatever slot they name
            return mass_SC.at[slot_S[jnp.minimum(entry_W, slot_count - 1)]].add(sums_WC)

        return sweep(count, step, mass_SC), None

    blocked = (
        q_THD.reshape(n, view.block_rows, heads, dim),
        lse_TH.reshape(n, view.block_rows, heads),
        view.rows.order_T.reshape(n, view.block_rows),
        view.blocks.slot_NS,
        view.blocks.count_N,
    )
    return lax.scan(one_block, jnp.zeros((slot_count, cells)), blocked)[0]
