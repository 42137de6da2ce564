"""What was fitted to a model: weights of signals, and what divergence to expect at a recompute ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

CONFIDENCE = 0.95
"""Share of requests with a budget whose divergence is to lie within it."""


@dataclass(frozen=True)
class Forecast:
    """Divergence from full attention, predicted for one prompt at each ratio of a ladder.

    ln KL = intercept + slope * ln(1 - part), where part is the share of the weighted signals that the recomputed tokens
    have, plus `mass` times ln of the attention that the question pays to what may be recomputed, plus `uncertainty`
    times the entropy, in nats, of the next token as the question's pass has it. margin: what is added so that of
    prompts alike, `CONFIDENCE` lie below at every ratio of the ladder at once.
    """

    ratios: tuple[float, ...]
    intercept: float
    slope: float
    mass: float
    uncertainty: float
    margin: float

    def kl(self, part: float, mass: float, entropy: float) -> float:
        """The bound, in nats. part: in [0, 1]. mass: above 0. entropy: in nats."""
        features = features_of(part, mass, entropy)
        coefficients = (self.intercept, self.slope, self.mass, self.uncertainty)
        return math.exp(min(self.margin + sum(a * x for a, x in zip(coefficients, features, strict=True)), 700.0))


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
