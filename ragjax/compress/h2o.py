"""h2o: what all rows attended to, and the most recent tokens (H2O, arXiv 2306.14048, section 4).

s_n = sum over all rows of attention to n; the mean over the query heads. Half of the budget is the most recent tokens,
half the heavy hitters, as in the paper's experiments and github.com/FMInference/H2O (heavy_ratio = recent_ratio). The
prompt alone is compressed; the paper goes on while it decodes (docs/log.md).
"""

from __future__ import annotations

import jax.numpy as jnp

from ragjax.compress.base import Evidence, Score, Scorer, uniform


class H2O(Scorer):
    needs_mass = True

    def score(self, evidence: Evidence) -> Score:
        if evidence.mass_NK is None:
            raise ValueError("h2o needs the attention that keys received (Evidence.mass_NK)")
        return uniform(jnp.where(evidence.valid_N[:, None], evidence.mass_NK, 0.0))

    def recent(self, budget: int, window: int) -> int:
        return max(window, budget // 2)
