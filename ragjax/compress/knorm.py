"""knorm: scores by keys alone, per KV head.

KNorm (arXiv 2406.11430: keys of lowest L2 norm are kept): s_n = 1 / (||k_n|| + 1e-6). The paper only ranks; GraphKV
multiplies scores, so they must be positive and fall with the norm: with -||k|| a factor below 1 would raise a score.
Another such map ranks the same without a graph.
"""

from __future__ import annotations

import jax.numpy as jnp

from ragjax.compress.base import Evidence, Score, Scorer, uniform
from ragjax.kernels.pages import from_storage

SMALL = 1e-6
"""Keeps the score of a key of zeros finite."""


class KNorm(Scorer):
    def score(self, evidence: Evidence) -> Score:
        norm_NK = jnp.linalg.norm(from_storage(evidence.k_NKD).astype(jnp.float32), axis=-1)
        return uniform(jnp.where(evidence.valid_N[:, None], 1.0 / (norm_NK + SMALL), 0.0))
