"""pqcache: a step's attention reads the keys that product quantization ranks highest (PQCache, arXiv 2407.12820).

The prompt is prefilled in full. Its keys are cut into 2 parts, each with 64 centroids per KV head, by k-means; a step
scores all keys by the products of its query with the centroids (sums over the query heads of a KV head) and attends,
exactly, to 4 sinks, the prompt's last 32 tokens, the best others up to the budget, and what was generated. k-means
begins with keys at equal distances and runs 8 rounds; a centroid that no key is nearest to stays. The paper overlaps it
with the prefill, on another processor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

PARTS, CENTROIDS, ROUNDS, SINKS, LOCAL = 2, 64, 8, 4, 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Retrieval:
    """One layer's keys as codes [K, M, N] of centroids [K, M, C, R]; `count` keys are real, `budget` are read."""

    centroid_KMCR: jax.Array
    code_KMN: jax.Array
    count: jax.Array
    budget: jax.Array

    def seen(self, q_THD: jax.Array) -> jax.Array:
        """The prompt's keys that each row reads, bool [K, T, N]."""
        heads, parts, _, width = self.centroid_KMCR.shape
        q_TKGMR = q_THD.reshape(len(q_THD), heads, -1, parts, width)
        table_KMTC = jnp.einsum("tkgmr,kmcr->kmtc", q_TKGMR, self.centroid_KMCR)
        score_KTN = jnp.take_along_axis(table_KMTC, self.code_KMN[:, :, None], -1).sum(1)
        index_N = jnp.arange(score_KTN.shape[-1])
        always_N = (index_N < SINKS) | (index_N >= self.count - LOCAL)
        score_KTN = jnp.where(index_N < self.count, jnp.where(always_N, jnp.inf, score_KTN), -jnp.inf)
        rank_KTN = jnp.argsort(jnp.argsort(-score_KTN, axis=-1), axis=-1)
        seen_KTN: jax.Array = (rank_KTN < self.budget) & (index_N < self.count)
        return seen_KTN


@partial(jax.jit, static_argnames="centroids")
def fit(k_NKD: jax.Array, count: jax.Array, budget: jax.Array, centroids: int = CENTROIDS) -> Retrieval:
    """The index of a layer's keys, of which rows from `count` on are padding."""
    tokens, heads, width = k_NKD.shape
    x_KMNR = k_NKD.astype(jnp.float32).reshape(tokens, heads, PARTS, width // PARTS).transpose(1, 2, 0, 3)
    real_N1 = (jnp.arange(tokens) < count)[:, None].astype(jnp.float32)

    def nearest(x_NR: jax.Array, centroid_CR: jax.Array) -> jax.Array:
        return (jnp.square(centroid_CR).sum(-1) - 2 * x_NR @ centroid_CR.T).argmin(-1)

    def means(x_NR: jax.Array) -> jax.Array:
        def round_(_: int, centroid_CR: jax.Array) -> jax.Array:
            mine_NC = jax.nn.one_hot(nearest(x_NR, centroid_CR), centroids) * real_N1
            number_C1 = mine_NC.sum(0)[:, None]
            return jnp.where(number_C1 > 0, mine_NC.T @ x_NR / jnp.maximum(number_C1, 1), centroid_CR)

        found_CR: jax.Array = jax.lax.fori_loop(0, ROUNDS, round_, x_NR[jnp.arange(centroids) * count // centroids])
        return found_CR

    centroid_KMCR = jax.vmap(jax.vmap(means))(x_KMNR)
    return Retrieval(centroid_KMCR, jax.vmap(jax.vmap(nearest))(x_KMNR, centroid_KMCR), count, budget)
