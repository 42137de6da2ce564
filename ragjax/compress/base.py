"""The interface of scorers, and the arrays of a layer that they see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp


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
    """Scores the importance of each token of a prompt; `ragjax.compress.SCORERS` has the scorers by name."""

    @abstractmethod
    def score(self, evidence: Evidence) -> jax.Array:
        """Scores of a layer's tokens, float32 >= 0 [N, K] (or [N, 1]: of all heads), 0 for padding.

        Pure, so that it can be compiled, and mapped over layers.
        """

    def recent(self, budget: int, window: int) -> int:
        """Number of last tokens that are kept whatever their score; at least the window."""
        return window
