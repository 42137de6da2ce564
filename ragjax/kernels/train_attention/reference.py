"""The dense definition of `interval_attention`, which JAX differentiates by itself; O(tokens x tokens) memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ragjax.kernels import table
from ragjax.kernels.train_attention.mask import Mask, Tokens


def attend(
    q_THD: jax.Array, k_TKD: jax.Array, v_TKD: jax.Array, mask: Mask, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `interval.interval_attention`; float32 at highest precision throughout."""
    t, heads, dim = q_THD.shape
    # padding may hold anything, NaN included, and 0 * NaN is NaN
    live_T11 = (mask.tokens.request_T >= 0)[:, None, None]
    q, k_SKD, v_SKD = (jnp.where(live_T11, x, 0).astype(jnp.float32) for x in (q_THD, k_TKD, v_TKD))
    q_TKGD = q.reshape(t, k_SKD.shape[1], -1, dim)
    seen_T11S = _seen(mask.tokens)[:, None, None]
    logits_TKGS = scale * jnp.einsum("tkgd,skd->tkgs", q_TKGD, k_SKD, precision="highest")
    # rows that see nothing are kept out of the logarithm, whose gradient there is NaN
    dead_T11 = ~seen_T11S.any(-1)
    kept_T11S = seen_T11S | dead_T11[..., None]
    lse_TKG = jax.nn.logsumexp(jnp.where(kept_T11S, logits_TKGS, -jnp.inf), axis=-1)
    prob_TKGS = jnp.exp(jnp.where(seen_T11S, logits_TKGS - lse_TKG[..., None], -jnp.inf))
    out_TKGD = jnp.einsum("tkgs,skd->tkgd", prob_TKGS, v_SKD, precision="highest")
    lse_TH = jnp.where(dead_T11, -jnp.inf, lse_TKG).reshape(t, heads)
    return out_TKGD.reshape(t, heads, dim).astype(q_THD.dtype), lse_TH


def _seen(tokens: Tokens) -> jax.Array:
    """The rule of the paged op, each token a row and an entry of one slot; bool [T, S]."""
    zero_T = jnp.zeros_like(tokens.index_T)
    rows = table.Rows(tokens.index_T, zero_T, tokens.request_T)
    slots_1SC = (x[None, :, None] for x in (tokens.index_T, tokens.hide_from_T, tokens.hide_until_T))
    return table.visible(rows, table.PageTable(zero_T[None], zero_T[None], tokens.request_T, *slots_1SC))[..., 0]
