"""Scorers of the tokens of a prompt, each by a paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import entr
from numpy.typing import NDArray

from ragjax.compress import budget
from ragjax.compress.base import Evidence, Score, Scorer
from ragjax.kernels.pages import from_storage

T = TypeVar("T")

SMALL = 1e-6  # keeps the score of a key of zeros finite
POOLED = 7  # tokens whose largest score each gets (SnapKV)
BETA = 20.0  # mean budget beside the window, over that of the last layer (PyramidKV)
GAMMA = 200.0  # weight of the variance beside the mean (CAKE)
AVERAGED = 5  # tokens over which scores are averaged (CAKE)


class KNorm(Scorer):
    """Keys of lowest L2 norm (arXiv 2406.11430), per KV head: s_n = 1 / (||k_n|| + 1e-6).

    The paper only ranks; GraphKV multiplies scores, so they must be positive and fall with the norm: with -||k|| a
    factor below 1 would raise a score. Another such map ranks the same without a graph.
    """

    def score(self, evidence: Evidence) -> Score:
        norm_NK = jnp.linalg.norm(from_storage(evidence.k_NKD).astype(jnp.float32), axis=-1)
        return _uniform(jnp.where(evidence.valid_N[:, None], 1.0 / (norm_NK + SMALL), 0.0))


class H2O(Scorer):
    """Scores by the attention of all rows, and by recency (H2O, arXiv 2306.14048, section 4).

    s_n = sum over all rows of attention to n; the mean over the query heads. Half of the budget is the most recent
    tokens, half the heavy hitters, as in the paper's experiments and github.com/FMInference/H2O (heavy_ratio =
    recent_ratio). The prompt alone is compressed; the paper goes on while it decodes (docs/log.md).
    """

    def score(self, evidence: Evidence) -> Score:
        if evidence.mass_NK is None:
            raise ValueError("h2o needs the attention that keys received (Evidence.mass_NK)")
        return _uniform(jnp.where(evidence.valid_N[:, None], evidence.mass_NK, 0.0))

    def recent(self, budget: int, window: int) -> int:
        return max(window, budget // 2)


class SnapKV(Scorer):
    """Tokens that the prompt's last rows attend to, with their surroundings (arXiv 2404.14469, section 4).

    s_n = pool(mean over the window's rows of attention to n), per query head; the mean over the heads of a KV head. The
    maximum over 7 tokens and a window of 32 rows are those of the authors' LongBench settings
    (github.com/FasterDecoding/SnapKV). The softmax is over all keys a row sees, as in their code.
    """

    def score(self, evidence: Evidence) -> Score:
        def pooled(prob_WGN: jax.Array) -> jax.Array:
            return _pool(prob_WGN.mean(0), POOLED, lax.max, -jnp.inf).mean(0)

        return _uniform(_by_head(evidence, pooled).T)


class PyramidKV(SnapKV):
    """SnapKV's scores, with budgets that fall linearly from layer 0 to the last (arXiv 2406.02069, section 4.2).

    With x = B - W beside the window: the last layer has x / beta, the first 2 x - x / beta; beta is 20, as in the
    paper. Where the first would have more than the prompt, the last has accordingly more (as in
    github.com/Zefan-Cai/KVCache-Factory).
    """

    def budgets(
        self, layers: int, size: int, window: int, count: int, preference_L: NDArray[np.float32] | None = None
    ) -> NDArray[np.int32]:
        return budget.pyramid(layers, size, window, count, BETA)


class CAKE(Scorer):
    """Tokens of high and shifting attention, more of them in layers where it is spread and unsteady (arXiv 2503.12491).

    Over the window's rows, per query head: s_n = mean_n + gamma var_n (section 4.3), averaged over 5 tokens; the mean
    over the heads of a KV head. A layer's preference is H^(1/tau1) V^(1/tau2) (section 4.1), H the entropy of the
    attention to tokens before the window and V its variance over the rows, both summed over heads and tokens; budgets
    beside the window are proportional to it. gamma 200, the mean over 5, a variance over W - 1, and tau 1 (which the
    authors tune for each model and budget) are those of their code (github.com/antgroup/cakekv, read in a copy,
    qtris123/cakekv). One row alone has variance 0; preferences that say nothing make budgets equal.
    """

    needs_preference = True

    def score(self, evidence: Evidence) -> Score:
        def measured(prob_WGN: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            mean_GN = prob_WGN.mean(0)
            var_GN = jnp.square(prob_WGN - mean_GN).sum(0) / max(1, len(prob_WGN) - 1)
            averaged_GN = _pool(mean_GN + GAMMA * var_GN, AVERAGED, lax.add, 0.0) / AVERAGED
            return averaged_GN.mean(0), entr(prob_WGN).sum(), var_GN.sum()

        s_KN, entropy_K, variance_K = _by_head(evidence, measured)
        return Score(s_KN.T, entropy_K.sum() * variance_K.sum())

    def budgets(
        self, layers: int, size: int, window: int, count: int, preference_L: NDArray[np.float32] | None = None
    ) -> NDArray[np.int32]:
        if preference_L is None:
            raise ValueError("cake's budgets need the layers' preferences")
        return budget.proportional(preference_L, size, window, count)


def _uniform(s_NK: jax.Array) -> Score:
    return Score(s_NK, jnp.ones((), jnp.float32))


def _pool(s_GN: jax.Array, size: int, combine: Callable[..., jax.Array], nothing: float) -> jax.Array:
    """Combine the scores of each token and its neighbours, `size` in all."""
    reach = (size // 2, size // 2)
    pooled_GN: jax.Array = lax.reduce_window(s_GN, nothing, combine, (1, size), (1, 1), ((0, 0), reach))
    return pooled_GN


def _by_head(evidence: Evidence, summary: Callable[[jax.Array], T]) -> T:
    """A summary of the window's attention for each KV head: its leaves have a first axis K.

    The summary gets float32 [W, G, N]: what each of the last W rows gives to each token before the window, from a
    softmax over all tokens that the row sees; 0 for the window's own tokens and for padding. One KV head at a time, so
    that no more than W x G x N probabilities exist.
    """
    q_WHD = evidence.q_WHD
    if q_WHD is None:
        raise ValueError("this scorer needs the window's queries (Evidence.q_WHD)")
    tokens, heads, width = evidence.k_NKD.shape
    rows = q_WHD.shape[0]
    q_WKGD = q_WHD.reshape(rows, heads, -1, width).astype(jnp.float32)
    index_N = jnp.arange(tokens)
    row_W = evidence.count - rows + jnp.arange(rows)
    seen_WN = index_N <= row_W[:, None]
    before_N = index_N < evidence.count - rows

    def of_head(head: jax.Array) -> T:
        k_ND = from_storage(evidence.k_NKD[:, head]).astype(jnp.float32)
        logit_WGN = jnp.einsum("wgd,nd->wgn", q_WKGD[:, head], k_ND, precision=lax.Precision.HIGHEST)
        logit_WGN *= width**-0.5 if evidence.scale is None else evidence.scale
        if evidence.cap is not None:
            logit_WGN = evidence.cap * jnp.tanh(logit_WGN / evidence.cap)
        logit_WGN = jnp.where(seen_WN[:, None], logit_WGN, -jnp.inf)
        return summary(jnp.where(before_N, jax.nn.softmax(logit_WGN, axis=-1), 0.0))

    stacked: T = lax.map(of_head, jnp.arange(heads))
    return stacked
