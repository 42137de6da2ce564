"""What a scorer sees of a layer, and what it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ragjax.compress import budget


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Evidence:
    """What the tokens of a prompt are scored by, in one layer.

    Row n of an array is the token at index n; rows from `count` on are padding and may hold anything. Keys and queries
    are rotated at the tokens' places in the prompt.

    k_NKD, v_NKD: keys and values; float32, bfloat16, float16 or uint16 (bfloat16 bits, as in `kernels.pages.Pages`).
    count: int32, tokens of the prompt; above the rows of `q_WHD`.
    q_WHD: queries of the prompt's last W tokens, oldest first; any float dtype.
    mass_NK: float32, attention that each key received from all rows, summed; by KV head, or [N, 1] over all heads.
    q_NHD: queries of all tokens, for graphs with "q" in their edges.
    plain_NKD: float32, keys before RoPE, for graphs that compare these.
    scale, cap: of attention logits, as of `kernels.view.View`; a scale of None is 1/sqrt(D).
    """

    k_NKD: jax.Array
    v_NKD: jax.Array
    count: jax.Array
    q_WHD: jax.Array | None = None
    mass_NK: jax.Array | None = None
    q_NHD: jax.Array | None = None
    plain_NKD: jax.Array | None = None
    scale: float | None = field(default=None, metadata={"static": True})
    cap: float | None = field(default=None, metadata={"static": True})

    @property
    def valid_N(self) -> jax.Array:
        """Which rows are tokens."""
        return jnp.arange(self.k_NKD.shape[0]) < self.count


class Score(NamedTuple):
    """Scores of a layer's tokens, float32 >= 0 [N, K] (or [N, 1]: of all heads), 0 for padding; and how much of the
    budget the layer asks for beside others, a float32 >= 0 (1 where the scorer has no view).
    """

    s_NK: jax.Array
    preference: jax.Array


class Scorer(ABC):
    """How important each token of a prompt is. One file each; `ragjax.compress.SCORERS` has them by name."""

    needs_queries: ClassVar[bool] = False
    """Whether it reads `Evidence.q_WHD`."""
    needs_mass: ClassVar[bool] = False
    """Whether it reads `Evidence.mass_NK`."""
    needs_preference: ClassVar[bool] = False
    """Whether its budgets depend on what was measured."""

    @abstractmethod
    def score(self, evidence: Evidence) -> Score:
        """Scores of one layer. Pure, so that it can be compiled, and mapped over layers."""

    def recent(self, budget: int, window: int) -> int:
        """How many of the last tokens are kept whatever their score; at least the window."""
        return window

    def budgets(
        self, layers: int, size: int, window: int, count: int, preference_L: NDArray[np.float32] | None = None
    ) -> NDArray[np.int32]:
        """Tokens kept in each layer, of `count`, int32 [L]: `size` each, if nothing else is said."""
        return budget.equal(layers, size, count)


def uniform(s_NK: jax.Array) -> Score:
    """Scores of a scorer without a view on layers."""
    return Score(s_NK, jnp.ones((), jnp.float32))
