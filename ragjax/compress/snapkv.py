"""snapkv: what the prompt's last rows attend to, with its surroundings (SnapKV, arXiv 2404.14469, section 4).

s_n = pool(mean over the window's rows of attention to n), per query head; the mean over the heads of a KV head. The
maximum over 7 tokens and a window of 32 rows are those of the authors' LongBench settings
(github.com/FasterDecoding/SnapKV, `experiments/LongBench/config/*_w32_k7_maxpool.json`); the class's own defaults there
are a mean over 5 and 64 rows. The softmax is over all keys a row sees, the window's included, as in their code.
"""

from __future__ import annotations

import jax

from ragjax.compress.base import Evidence, Score, Scorer, uniform
from ragjax.compress.window import by_head, max_pool

KERNEL = 7
"""Tokens whose largest score each gets."""


class SnapKV(Scorer):
    """The window's attention, pooled."""

    needs_queries = True

    def score(self, evidence: Evidence) -> Score:
        """See the module."""

        def pooled(prob_WGN: jax.Array) -> jax.Array:
            return max_pool(prob_WGN.mean(0), KERNEL).mean(0)

        return uniform(by_head(evidence, pooled).T)
