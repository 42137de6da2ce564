"""How the next token of one row of logits is chosen, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Adjusted:
    """Tokens whose logits change before one is chosen, [A] each.

    token: int32, none twice. factor: what a logit is divided by if above 0, and multiplied by otherwise, float32.
    add: what is added then, float32.
    """

    token_A: NDArray[np.int32]
    factor_A: NDArray[np.float32]
    add_A: NDArray[np.float32]


@dataclass(frozen=True)
class Draw:
    """How a token is chosen: the likeliest, unless a temperature is given.

    top_k: likeliest tokens that may be drawn (0: all). top_p: mass that the likeliest of these reach together. uniform:
    where in the distribution to draw, in [0, 1). logprobs: whether log-probabilities are wanted. allowed: which tokens
    may be chosen, uint32 [W], token t by bit t % 32 of word t // 32; no others, and none beyond the last word (None:
    all may).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    uniform: float = 0.0
    adjusted: Adjusted | None = None
    logprobs: bool = False
    allowed: NDArray[np.uint32] | None = None


@dataclass(frozen=True)
class Chosen:
    """A token that was chosen.

    logprob: its natural-log probability by the model alone, if it was wanted. top: the likeliest tokens with theirs,
    likeliest first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
