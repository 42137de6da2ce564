"""snapkv and pyramidkv: tokens that the prompt's last rows attend to, with their surroundings.

SnapKV (arXiv 2404.14469, section 4): s_n = pool(mean over the window's rows of attention to n), per query head; the
mean over the heads of a KV head. The maximum over 7 tokens and a window of 32 rows are those of the authors' LongBench
settings (github.com/FasterDecoding/SnapKV). The softmax is over all keys a row sees, as in their code.

PyramidKV (arXiv 2406.02069, section 4.2): SnapKV's scores, with budgets that fall linearly from layer 0 to the last.
With x = B - W beside the window: the last layer has x / beta, the first 2 x - x / beta; beta is 20, as in the paper.
Where the first would have more than the prompt, the last has accordingly more (as in github.com/Zefan-Cai/KVCache-
Factory).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from ragjax.compress import budget
from ragjax.compress.base import Evidence, Score, Scorer, uniform
from ragjax.kernels.pages import from_storage

T = TypeVar("T")


def by_head(evidence: Evidence, summary: Callable[[jax.Array], T]) -> T:
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


def max_pool(s_GN: jax.Array, size: int) -> jax.Array:
    reach = (size // 2, size // 2)
    pooled_GN: jax.Array = lax.reduce_window(s_GN, -jnp.inf, lax.max, (1, size), (1, 1), ((0, 0), reach))
    return pooled_GN


def mean_pool(s_GN: jax.Array, size: int) -> jax.Array:
    reach = (size // 2, size // 2)
    sum_GN: jax.Array = lax.reduce_window(s_GN, 0.0, lax.add, (1, size), (1, 1), ((0, 0), reach))
    return sum_GN / size


KERNEL = 7
"""Tokens whose largest score each gets."""


class SnapKV(Scorer):
    needs_queries = True

    def score(self, evidence: Evidence) -> Score:
        def pooled(prob_WGN: jax.Array) -> jax.Array:
            return max_pool(prob_WGN.mean(0), KERNEL).mean(0)

        return uniform(by_head(evidence, pooled).T)


BETA = 20.0
"""Mean budget beside the window, over that of the last layer."""


class PyramidKV(SnapKV):
    def budgets(
        self, layers: int, size: int, window: int, count: int, preference_L: NDArray[np.float32] | None = None
    ) -> NDArray[np.int32]:
        return budget.pyramid(layers, size, window, count, BETA)
