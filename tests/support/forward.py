"""The plain reading of a model: a dense causal forward of one prompt."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ragjax.models.config import ModelConfig
from ragjax.models.decoder import Decoder, rotation_table


def dense_logits(decoder: Decoder, tokens_T: jax.Array) -> jax.Array:
    """Next-token logits of all tokens, float32 [T, V]."""
    t = tokens_T.shape[0]
    rotation = rotation_table(decoder.config, t)
    cos_TR, sin_TR = rotation.at(jnp.arange(t))
    causal_TT = jnp.tril(jnp.ones((t, t), bool))
    x_TE = decoder.embed(tokens_T)
    for layer in decoder.layers:
        q_THD, k_TKD, v_TKD = layer.project(x_TE, cos_TR, sin_TR)
        x_TE = layer.finish(x_TE, _attend(q_THD, k_TKD, v_TKD, causal_TT, decoder.config))
    return decoder.unembed(x_TE)


def _attend(q_THD: jax.Array, k_SKD: jax.Array, v_SKD: jax.Array, seen_TS: jax.Array, config: ModelConfig) -> jax.Array:
    t, h, d = q_THD.shape
    q_TKGD = q_THD.reshape(t, k_SKD.shape[1], -1, d) * config.attention_scale
    logits_KGTS = jnp.einsum("tkgd,skd->kgts", q_TKGD, k_SKD, precision="highest")
    if config.attention_cap is not None:
        logits_KGTS = config.attention_cap * jnp.tanh(logits_KGTS / config.attention_cap)
    prob_KGTS = jax.nn.softmax(jnp.where(seen_TS, logits_KGTS, -jnp.inf), axis=-1)
    return jnp.einsum("kgts,skd->tkgd", prob_KGTS, v_SKD, precision="highest").reshape(t, h, d)
