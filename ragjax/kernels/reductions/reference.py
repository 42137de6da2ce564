"""The dense definitions of `reductions`: the contract in the fewest words, O(rows x keys) memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ragjax.kernels.attention.reference import gather
from ragjax.kernels.pages import from_storage
from ragjax.kernels.rope import rotate
from ragjax.kernels.table import visible
from ragjax.kernels.view import View


def masked_logits(q_THD: jax.Array, view: View) -> jax.Array:
    """Scaled logits of all heads, -inf where hidden, float32 [T, H, S, C]."""
    k_SCKD, _ = gather(view)
    t, heads, dim = q_THD.shape
    q_TKGD = q_THD.astype(jnp.float32).reshape(t, k_SCKD.shape[2], -1, dim)
    logits_TKGSC = view.capped(view.scale * jnp.einsum("tkgd,sckd->tkgsc", q_TKGD, k_SCKD, precision="highest"))
    logits_THSC = logits_TKGSC.reshape(t, heads, *k_SCKD.shape[:2])
    return jnp.where(visible(view.rows, view.entries)[:, None], logits_THSC, -jnp.inf)


def probabilities(q_THD: jax.Array, lse_TH: jax.Array, view: View) -> jax.Array:
    """Attention probabilities of all heads, zero where hidden, float32 [T, H, S, C]."""
    logits_THSC = masked_logits(q_THD, view)
    return jnp.where(jnp.isneginf(logits_THSC), 0.0, jnp.exp(logits_THSC - lse_TH[..., None, None]))


def key_scores(
    q_THD: jax.Array, lse_TH: jax.Array, view: View, chosen_T: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """See `op.key_scores`."""
    prob_THSC = probabilities(q_THD, lse_TH, view)
    if chosen_T is not None:
        prob_THSC = jnp.where(chosen_T[:, None, None, None], prob_THSC, 0.0)
    norm_SCK = jnp.linalg.norm(gather(view)[1], axis=-1)
    norm_HSC = jnp.repeat(jnp.moveaxis(norm_SCK, -1, 0), q_THD.shape[1] // norm_SCK.shape[-1], axis=0)
    score_HSC = prob_THSC.sum(0)
    # a slot nobody sees may hold NaN
    return score_HSC.mean(0), jnp.where(score_HSC > 0, score_HSC * norm_HSC, 0.0).mean(0)


def chunk_score(
    q_THD: jax.Array, view: View, key_segment_SC: jax.Array, segments: int, chosen_T: jax.Array | None
) -> jax.Array:
    """See `op.chunk_score`."""
    logits_THSC = masked_logits(q_THD, view)
    if chosen_T is not None:
        logits_THSC = jnp.where(chosen_T[:, None, None, None], logits_THSC, -jnp.inf)
    score_SC = jnp.zeros(key_segment_SC.shape)
    for segment in range(segments):
        inside_THSC = jnp.where(key_segment_SC == segment, logits_THSC, -jnp.inf)
        lse_TH = jax.nn.logsumexp(inside_THSC, axis=(-2, -1))[..., None, None]
        score_SC += jnp.exp(inside_THSC - jnp.where(jnp.isneginf(lse_TH), jnp.inf, lse_TH)).mean(1).sum(0)
    return score_SC


def row_segment_score(
    q_THD: jax.Array,
    lse_TH: jax.Array,
    view: View,
    row_segment_T: jax.Array,
    key_segment_SC: jax.Array,
    segments: int,
) -> jax.Array:
    """See `op.row_segment_score`."""
    prob_TSC = probabilities(q_THD, lse_TH, view).mean(1)
    row_T11 = row_segment_T[:, None, None]
    own_TSC = (row_T11 == key_segment_SC) & (view.rows.index_T[:, None, None] == view.entries.index_SC)
    prob_TSC = jnp.where(own_TSC | (row_T11 < 0) | (row_T11 >= segments), 0.0, prob_TSC)
    in_segment_SCZ = jax.nn.one_hot(key_segment_SC, segments)
    return jnp.einsum("tsc,scz->tz", prob_TSC, in_segment_SCZ, precision="highest")


def kv_deviation(
    k_TKD: jax.Array, v_TKD: jax.Array, view: View, slot_T: jax.Array, offset_T: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `op.kv_deviation`."""
    pages = view.pages

    def of_token(
        k_KD: jax.Array, v_KD: jax.Array, slot: jax.Array, offset: jax.Array, index: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        kept_k_KD, kept_v_KD = (
            from_storage(pool[view.layer, slot // pages.page_size, :, slot % pages.page_size]).astype(jnp.float32)
            for pool in (pages.k_LPKCD, pages.v_LPKCD)
        )
        moved_KD = rotate(kept_k_KD, *view.rotation.at(offset))
        compared = (slot >= 0) & (index >= 0)
        return tuple(  # type: ignore[return-value]
            jnp.where(compared, jnp.square(new.astype(jnp.float32) - kept).sum(), 0.0)
            for new, kept in ((k_KD, moved_KD), (v_KD, kept_v_KD))
        )

    return jax.vmap(of_token)(k_TKD, v_TKD, slot_T, offset_T, view.rows.index_T)


def key_neighbours(
    k_NKD: jax.Array, valid_N: jax.Array, source_I: jax.Array, count: int, asking_NKD: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `op.key_neighbours`."""

    def flat(x_NKD: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_NE = jnp.where(valid_N[:, None, None], from_storage(x_NKD).astype(jnp.float32), 0.0).reshape(len(x_NKD), -1)
        length_N = jnp.linalg.norm(x_NE, axis=-1)
        return x_NE, jnp.where(length_N > 0, length_N, jnp.inf)  # a key of zeros is like no other

    key_NE, length_N = flat(k_NKD)
    asking_NE, asking_length_N = flat(asking_NKD)
    product_IN = jnp.einsum("ie,ne->in", asking_NE[source_I], key_NE, precision="highest")
    cosine_IN = product_IN / (asking_length_N[source_I, None] * length_N)
    real_I = (source_I >= 0) & valid_N[source_I]
    others_IN = (source_I[:, None] != jnp.arange(len(k_NKD), dtype=jnp.int32)) & valid_N & real_I[:, None]
    index_IN = jnp.argsort(jnp.where(others_IN, -cosine_IN, jnp.inf), axis=1, stable=True).astype(jnp.int32)
    index_IY = jnp.pad(index_IN, ((0, 0), (0, count)))[:, :count]
    within_Y = jnp.arange(count, dtype=jnp.int32) < len(k_NKD)
    found_IY = within_Y & jnp.take_along_axis(others_IN, index_IY, 1)
    cosine_IY = jnp.take_along_axis(cosine_IN, index_IY, 1)
    return jnp.where(found_IY, jnp.maximum(cosine_IY, 0.0), 0.0), jnp.where(found_IY, index_IY, -1)
