"""The dense definition of `train_attention`, which JAX differentiates by itself; O(tokens x tokens) memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from train.attention.mask import Mask, visible


def attend(
    q_THD: jax.Array, k_TKD: jax.Array, v_TKD: jax.Array, mask: Mask, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `op.train_attention`; float32 at highest precision throughout."""
    t, heads, dim = q_THD.shape
    # padding may hold anything, NaN included, and 0 * NaN is NaN
    live_T11 = (mask.tokens.request_T >= 0)[:, None, None]
    q, k_SKD, v_SKD = (jnp.where(live_T11, x, 0).astype(jnp.float32) for x in (q_THD, k_TKD, v_TKD))
    q_TKGD = q.reshape(t, k_SKD.shape[1], -1, dim)
    rows = jax.tree.map(lambda x_T: x_T[:, None], mask.tokens)
    seen_T11S = visible(rows, mask.tokens)[:, None, None]
    logits_TKGS = scale * jnp.einsum("tkgd,skd->tkgs", q_TKGD, k_SKD, precision="highest")
    # rows that see nothing are kept out of the logarithm, whose gradient there is NaN
    dead_T11 = ~seen_T11S.any(-1)
    kept_T11S = seen_T11S | dead_T11[..., None]
    lse_TKG = jax.nn.logsumexp(jnp.where(kept_T11S, logits_TKGS, -jnp.inf), axis=-1)
    prob_TKGS = jnp.exp(jnp.where(seen_T11S, logits_TKGS - lse_TKG[..., None], -jnp.inf))
    out_TKGD = jnp.einsum("tkgs,skd->tkgd", prob_TKGS, v_SKD, precision="highest")
    lse_TH = jnp.where(dead_T11, -jnp.inf, lse_TKG).reshape(t, heads)
    return out_TKGD.reshape(t, heads, dim).astype(q_THD.dtype), lse_TH
