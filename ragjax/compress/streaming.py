"""streaming: the first tokens and the last ones (StreamingLLM, arXiv 2309.17453, section 3).

s_n = 2 for the first 4 tokens, which draw attention whatever they say (Table 2: 4 of them suffice); otherwise
(n + 1) / N, so that the most recent are kept. Places stay those of the prompt; the paper's become those in the cache.
"""

from __future__ import annotations

import jax.numpy as jnp

from ragjax.compress.base import Evidence, Score, Scorer, uniform

SINKS = 4
"""First tokens that are kept."""


class Streaming(Scorer):
    """Sinks, then the newest."""

    def score(self, evidence: Evidence) -> Score:
        index_N = jnp.arange(evidence.k_NKD.shape[0])
        age_N = (index_N + 1).astype(jnp.float32) / evidence.count.astype(jnp.float32)
        s_N = jnp.where(evidence.valid_N, jnp.where(index_N < SINKS, 2.0, age_N), 0.0)
        return uniform(s_N[:, None])
