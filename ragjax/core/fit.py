"""What was fitted to a model: weights of signals, and what divergence to expect at a recompute ratio."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
"""Share of requests with a budget whose divergence is to lie within it."""


@dataclass(frozen=True)
class Forecast:
    """Divergence from full attention, predicted for one prompt at each ratio of a ladder.

    ln KL = intercept + slope * ln(1 - part), where part is the share of the weighted signals that the recomputed tokens
    have, plus `mass` times ln of the attention that the question pays to what may be recomputed, plus `uncertainty`
    times the entropy, in nats, of the next token as the question's pass has it.

    ratios: ascending. held: of each prompt that was held out, at each ratio, ln KL as forecast, and the KL, in nats.
    """

    ratios: tuple[float, ...]
    intercept: float
    slope: float
    mass: float
    uncertainty: float
    held: tuple[tuple[tuple[float, float], ...], ...] = ()

    def log_kl(self, part: float, mass: float, entropy: float) -> float:
        """Ln KL to expect. part: in [0, 1]. mass: above 0. entropy: in nats."""
        coefficients = (self.intercept, self.slope, self.mass, self.uncertainty)
        return sum(a * x for a, x in zip(coefficients, features_of(part, mass, entropy), strict=True))

    def cutoff(self, kl: float) -> float:
        """The ln KL below which a forecast must lie for a budget of `kl` nats to be kept at the confidence.

        Split conformal prediction (Vovk et al. 2005). A prompt's own cutoff is the least forecast among the ratios at
        which it exceeds the budget; of m prompts, that of rank ceil((m + 1) * confidence) from above is taken. A new
        prompt like these exceeds it at a ratio of lower forecast in 1 - confidence of all cases at most.
        """
        own = (min((expected for expected, seen in rungs if seen > kl), default=math.inf) for rungs in self.held)
        rank = rank_of(len(self.held))
        return -math.inf if rank is None else sorted(own, reverse=True)[rank - 1]

    def pick(self, kl: float, expected: Sequence[float]) -> int | None:
        """Which ratio, the least, keeps a budget of `kl` nats; None: none does. expected: ln KL at each."""
        cutoff = self.cutoff(kl)
        return next((i for i, log_kl in enumerate(expected) if log_kl < cutoff), None)


def rank_of(prompts: int, confidence: float = CONFIDENCE) -> int | None:
    """Which of so many prompts' errors, ascending, 1 the least, bounds a new one's; None: there are too few."""
    rank = math.ceil((prompts + 1) * confidence - 1e-9)
    return rank if rank <= prompts else None


def features_of(part: float, mass: float, entropy: float) -> tuple[float, float, float, float]:
    """What ln KL is linear in."""
    return 1.0, math.log(max(1.0 - part, FLOOR)), math.log(max(mass, FLOOR)), entropy


FLOOR = 1e-3
"""Least share that a logarithm is taken of."""


@dataclass(frozen=True)
class Fit:
    """weights: of signals (`ragjax.reuse.signals`), by name, none negative. top_k: chunks of a question then. forecast:
    None if too few questions were held out.
    """

    weights: Mapping[str, float]
    top_k: int
    forecast: Forecast | None = None

    @property
    def digest(self) -> str:
        """Of the weights, by which tokens are chosen; hex."""
        named = sorted((name, float(weight)) for name, weight in self.weights.items())
        return hashlib.sha256(repr(named).encode()).hexdigest()
