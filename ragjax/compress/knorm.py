"""knorm and keydiff: scores by keys alone, per KV head.

KNorm (arXiv 2406.11430: keys of lowest L2 norm are kept): s_n = 1 / (||k_n|| + 1e-6). The paper only ranks; GraphKV
multiplies scores, so they must be positive and fall with the norm: with -||k|| a factor below 1 would raise a score.
Another such map ranks the same without a graph.

KeyDiff (arXiv 2504.15364; as in github.com/NVIDIA/kvpress): s_n = 1 - cos(k_n, a), where a is the mean of all keys,
each of length 1. The paper ranks by -cos; one more makes the score positive. A key of zeros has cosine 0.
"""

from __future__ import annotations

import jax.numpy as jnp

from ragjax.compress.base import Evidence, Score, Scorer, uniform
from ragjax.kernels.pages import from_storage

SMALL = 1e-6
"""Keeps the score of a key of zeros finite."""


class KNorm(Scorer):
    """The reciprocal of a key's length."""

    def score(self, evidence: Evidence) -> Score:
        norm_NK = jnp.linalg.norm(from_storage(evidence.k_NKD).astype(jnp.float32), axis=-1)
        return uniform(jnp.where(evidence.valid_N[:, None], 1.0 / (norm_NK + SMALL), 0.0))


class KeyDiff(Scorer):
    """Distance of a key's direction from the mean direction."""

    def score(self, evidence: Evidence) -> Score:
        k_NKD = jnp.where(evidence.valid_N[:, None, None], from_storage(evidence.k_NKD).astype(jnp.float32), 0.0)
        norm_NK1 = jnp.linalg.norm(k_NKD, axis=-1, keepdims=True)
        unit_NKD = k_NKD / jnp.where(norm_NK1 > 0, norm_NK1, jnp.inf)
        anchor_KD = unit_NKD.sum(0) / evidence.count.astype(jnp.float32)
        length_K = jnp.linalg.norm(anchor_KD, axis=-1)
        cosine_NK = (unit_NKD * anchor_KD).sum(-1) / jnp.where(length_K > 0, length_K, jnp.inf)
        return uniform(jnp.where(evidence.valid_N[:, None], jnp.maximum(1.0 - cosine_NK, 0.0), 0.0))
