"""The dense definition of `paged_interval_attention`: the contract in the fewest words, O(rows x keys) memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ragjax.kernels.pages import from_storage
from ragjax.kernels.rope import rotate
from ragjax.kernels.table import visible
from ragjax.kernels.view import View


def attend(q_THD: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
    """See `op.paged_interval_attention`; float32 at highest precision throughout."""
    k_SCKD, v_SCKD = gather(view)
    t, heads, dim = q_THD.shape
    q_TKGD = q_THD.astype(jnp.float32).reshape(t, k_SCKD.shape[2], -1, dim)
    logits_TKGSC = view.capped(view.scale * jnp.einsum("tkgd,sckd->tkgsc", q_TKGD, k_SCKD, precision="highest"))
    seen_TSC = visible(view.rows, view.entries)
    logits_TKGSC = jnp.where(seen_TSC[:, None, None], logits_TKGSC, -jnp.inf)
    lse_TKG = jax.nn.logsumexp(logits_TKGSC, axis=(-2, -1))
    safe_TKG = jnp.where(jnp.isneginf(lse_TKG), 0.0, lse_TKG)
    prob_TKGSC = jnp.exp(logits_TKGSC - safe_TKG[..., None, None])
    # a slot nobody sees may hold anything, NaN included, and 0 * NaN is NaN
    v_SCKD = jnp.where(seen_TSC.any(0)[..., None, None], v_SCKD, 0.0)
    out_TKGD = jnp.einsum("tkgsc,sckd->tkgd", prob_TKGSC, v_SCKD, precision="highest")
    return out_TKGD.reshape(t, heads, dim).astype(q_THD.dtype), lse_TKG.reshape(t, heads)


def gather(view: View) -> tuple[jax.Array, jax.Array]:
    """Keys, moved to where they take part, and values of all entries, float32 [S, C, K, D]."""
    pages, entries = view.pages, view.entries
    k_SKCD = from_storage(pages.k_LPKCD[view.layer][entries.page_S]).astype(jnp.float32)
    v_SKCD = from_storage(pages.v_LPKCD[view.layer][entries.page_S]).astype(jnp.float32)
    cos_SR, sin_SR = view.rotation.at(entries.offset_S)
    k_SKCD = rotate(k_SKCD, cos_SR[:, None, None], sin_SR[:, None, None])
    return k_SKCD.swapaxes(1, 2), v_SKCD.swapaxes(1, 2)
