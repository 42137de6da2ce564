"""cake: tokens of high and shifting attention, more of them in layers where it is spread and unsteady (CAKE).

Source: arXiv 2503.12491. Over the window's rows, per query head: s_n = mean_n + gamma var_n (section 4.3), averaged
over 5 tokens; the mean over the heads of a KV head. A layer's preference is H^(1/tau1) V^(1/tau2) (section 4.1), H the
entropy of the attention to tokens before the window and V its variance over the rows, both summed over heads and
tokens; budgets beside the window are proportional to it. gamma 200, the mean over 5, a variance over W - 1, and tau 1
(which the authors tune for each model and budget) are those of their code (github.com/antgroup/cakekv, read in a copy,
qtris123/cakekv). One row alone has variance 0; preferences that say nothing make budgets equal.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import entr
from numpy.typing import NDArray

from ragjax.compress import budget
from ragjax.compress.base import Evidence, Score, Scorer
from ragjax.compress.snapkv import by_head, mean_pool

GAMMA = 200.0
"""Weight of the variance beside the mean."""
KERNEL = 5
"""Tokens over which scores are averaged."""


class CAKE(Scorer):
    needs_queries = True
    needs_preference = True

    def score(self, evidence: Evidence) -> Score:
        def measured(prob_WGN: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            mean_GN = prob_WGN.mean(0)
            var_GN = jnp.square(prob_WGN - mean_GN).sum(0) / max(1, len(prob_WGN) - 1)
            return mean_pool(mean_GN + GAMMA * var_GN, KERNEL).mean(0), entr(prob_WGN).sum(), var_GN.sum()

        s_KN, entropy_K, variance_K = by_head(evidence, measured)
        return Score(s_KN.T, entropy_K.sum() * variance_K.sum())

    def budgets(
        self, layers: int, size: int, window: int, count: int, preference_L: NDArray[np.float32] | None = None
    ) -> NDArray[np.int32]:
        if preference_L is None:
            raise ValueError("cake's budgets need the layers' preferences")
        return budget.proportional(preference_L, size, window, count)
