"""Scorers of the tokens of a prompt, each by a paper, and the arrays of a layer that they see (docs/compression.md).

Pure functions over the arrays of one layer, which the runner compiles and maps over layers. A new scorer is a class,
one line in `SCORERS`, and its name in `METHODS` of `ragjax/core/compression.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from ragjax.kernels.pages import from_storage

SMALL = 1e-6  # keeps the score of a key of zeros finite
POOLED = 7  # tokens whose largest score each gets (SnapKV)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Evidence:
    """Arrays of one layer by which the tokens of a prompt are scored.

    Row n of an array is the token at index n; rows from `count` on are padding and may hold anything. Keys and queries
    are rotated at the tokens' places in the prompt.

    Keys and values are float32, bfloat16, float16 or uint16 (bfloat16 bits, as in `kernels.pages.Pages`).
    """

    k_NKD: jax.Array
    v_NKD: jax.Array
    count: jax.Array  # int32, tokens of the prompt; above the rows of `q_WHD`
    q_WHD: jax.Array | None = None  # queries of the prompt's last W tokens, oldest first; any float dtype
    mass_NK: jax.Array | None = None  # float32, attention that each key received, summed over rows; or [N, 1]
    scale: float | None = field(default=None, metadata={"static": True})  # of attention logits; None: 1/sqrt(D)
    cap: float | None = field(default=None, metadata={"static": True})  # of attention logits

    @property
    def valid_N(self) -> jax.Array:
        return jnp.arange(self.k_NKD.shape[0]) < self.count


class Scorer(ABC):
    """Scores the importance of each token of a prompt; `SCORERS` has them by name."""

    @abstractmethod
    def score(self, evidence: Evidence) -> jax.Array:
        """Scores of a layer's tokens, float32 >= 0 [N, K] (or [N, 1]: of all heads), 0 for padding.

        Pure, so that it can be compiled, and mapped over layers.
        """

    def recent(self, budget: int, window: int) -> int:
        """Number of last tokens that are kept whatever their score; at least the window."""
        return window


class KNorm(Scorer):
    """Keys of lowest L2 norm (arXiv 2406.11430), per KV head: s_n = 1 / (||k_n|| + 1e-6).

    The paper only ranks; GraphKV multiplies scores, so they must be positive and fall with the norm: with -||k|| a
    factor below 1 would raise a score. Another such map ranks the same without a graph.
    """

    def score(self, evidence: Evidence) -> jax.Array:
        norm_NK = jnp.linalg.norm(from_storage(evidence.k_NKD).astype(jnp.float32), axis=-1)
        return jnp.where(evidence.valid_N[:, None], 1.0 / (norm_NK + SMALL), 0.0)


class H2O(Scorer):
    """Scores by the attention of all rows, and by recency (H2O, arXiv 2306.14048, section 4).

    s_n = sum over all rows of attention to n; the mean over the query heads. Half of the budget is the most recent
    tokens, half the heavy hitters, as in the paper's experiments and github.com/FMInference/H2O (heavy_ratio =
    recent_ratio). The prompt alone is compressed; the paper goes on while it decodes (docs/log.md).
    """

    def score(self, evidence: Evidence) -> jax.Array:
        if evidence.mass_NK is None:
            raise ValueError("h2o needs the attention that keys received (Evidence.mass_NK)")
        return jnp.where(evidence.valid_N[:, None], evidence.mass_NK, 0.0)

    def recent(self, budget: int, window: int) -> int:
        return max(window, budget // 2)


class SnapKV(Scorer):
    """Tokens that the prompt's last rows attend to, with their surroundings (arXiv 2404.14469, section 4).

    s_n = pool(mean over the window's rows of attention to n), per query head; the mean over the heads of a KV head. The
    maximum over 7 tokens and a window of 32 rows are those of the authors' LongBench settings
    (github.com/FasterDecoding/SnapKV). The softmax is over all keys a row sees, as in their code.
    """

    def score(self, evidence: Evidence) -> jax.Array:
        if evidence.q_WHD is None:
            raise ValueError("snapkv needs the window's queries (Evidence.q_WHD)")

        def of_head(head: jax.Array) -> jax.Array:
            return _pooled(_attention(evidence, head).mean(0)).mean(0)

        s_KN: jax.Array = lax.map(of_head, jnp.arange(evidence.k_NKD.shape[1]))
        return s_KN.T


def _pooled(s_GN: jax.Array) -> jax.Array:
    """The largest score of each token and its neighbours, `POOLED` in all."""
    around = (POOLED // 2, POOLED // 2)
    pooled_GN: jax.Array = lax.reduce_window(s_GN, -jnp.inf, lax.max, (1, POOLED), (1, 1), ((0, 0), around))
    return pooled_GN


def _attention(evidence: Evidence, head: jax.Array) -> jax.Array:
    """Attention of the window's rows to each token before the window, of the queries of a KV head: float32 [W, G, N].

    From a softmax over all tokens that the row sees; 0 for the window's own tokens and for padding.
    """
    assert evidence.q_WHD is not None
    tokens, heads, width = evidence.k_NKD.shape
    rows = evidence.q_WHD.shape[0]
    q_WKGD = evidence.q_WHD.reshape(rows, heads, -1, width).astype(jnp.float32)
    index_N = jnp.arange(tokens)
    row_W = evidence.count - rows + jnp.arange(rows)
    k_ND = from_storage(evidence.k_NKD[:, head]).astype(jnp.float32)
    logit_WGN = jnp.einsum("wgd,nd->wgn", q_WKGD[:, head], k_ND, precision=lax.Precision.HIGHEST)
    logit_WGN *= width**-0.5 if evidence.scale is None else evidence.scale
    if evidence.cap is not None:
        logit_WGN = evidence.cap * jnp.tanh(logit_WGN / evidence.cap)
    logit_WGN = jnp.where((index_N <= row_W[:, None])[:, None], logit_WGN, -jnp.inf)
    return jnp.where(index_N < evidence.count - rows, jax.nn.softmax(logit_WGN, axis=-1), 0.0)


SCORERS: Mapping[str, Scorer] = dict(snapkv=SnapKV(), h2o=H2O(), knorm=KNorm())
