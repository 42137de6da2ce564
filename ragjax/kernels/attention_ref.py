"""The dense definition of `paged_interval_attention`: the contract in the fewest words, O(rows x keys) memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ragjax.kernels.attention import Pages, Rows, Slots, from_storage, visible
from ragjax.kernels.rope import Rotation, rotate


def attend(
    q_THD: jax.Array,
    rows: Rows,
    pages: Pages,
    layer: int | jax.Array,
    slots: Slots,
    rotation: Rotation,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `attention.paged_interval_attention`; float32 at highest precision throughout."""
    k_SCKD, v_SCKD = gather(pages, layer, slots, rotation)
    t, heads, dim = q_THD.shape
    q_TKGD = q_THD.reshape(t, k_SCKD.shape[2], -1, dim)
    logits_TKGSC = scale * jnp.einsum("tkgd,sckd->tkgsc", q_TKGD, k_SCKD, precision="highest")
    seen_TSC = visible(rows, slots)
    logits_TKGSC = jnp.where(seen_TSC[:, None, None], logits_TKGSC, -jnp.inf)
    lse_TKG = jax.nn.logsumexp(logits_TKGSC, axis=(-2, -1))
    safe_TKG = jnp.where(jnp.isneginf(lse_TKG), 0.0, lse_TKG)
    prob_TKGSC = jnp.exp(logits_TKGSC - safe_TKG[..., None, None])
    # a cell nobody sees may hold anything, NaN included, and 0 * NaN is NaN
    v_SCKD = jnp.where(seen_TSC.any(0)[..., None, None], v_SCKD, 0.0)
    out_TKGD = jnp.einsum("tkgsc,sckd->tkgd", prob_TKGSC, v_SCKD, precision="highest")
    return out_TKGD.reshape(t, heads, dim), lse_TKG.reshape(t, heads)


def gather(pages: Pages, layer: int | jax.Array, slots: Slots, rotation: Rotation) -> tuple[jax.Array, jax.Array]:
    """Keys, moved to where they take part, and values of all slots, float32 [S, C, K, D]."""
    k_SKCD = from_storage(pages.k_LPKCD[layer][slots.page_AS[0]]).astype(jnp.float32)
    v_SKCD = from_storage(pages.v_LPKCD[layer][slots.page_AS[0]]).astype(jnp.float32)
    cos_SR, sin_SR = rotation.at(slots.offset_AS[0])
    k_SKCD = rotate(k_SKCD, cos_SR[:, None, None], sin_SR[:, None, None])
    return k_SKCD.swapaxes(1, 2), v_SKCD.swapaxes(1, 2)
