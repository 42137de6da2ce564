"""Trials: what the fit of a selector recomputes, random sets of tokens, and the sets that fitted weights choose.

A set is drawn by signals in a random mixture, times a random factor for each token, so that sets differ in what they
have of each signal and few are worthless. Signals are measured once for a prompt, and used for all its trials.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import numpy as np

from ragjax.core import Pass, Results, Tokens
from ragjax.reuse.fitted import Weighted, probe, read
from ragjax.reuse.repair import Choice, Selector
from ragjax.reuse.select import top
from ragjax.reuse.signals import MEASURES, NAMES, Signals
from ragjax.reuse.stitch import Stitched

EVEN = 0.3
"""Of the Dirichlet distribution that mixtures are drawn from: a few signals lead in each."""

SPREAD = (0.5, 2.0)
"""Standard deviations of the logarithm of the random factor; each is drawn equally often."""


class Once:
    """Signals of one prompt, measured when they are first wanted."""

    def __init__(self) -> None:
        self.found: Signals | None = None

    def of(self, stitched: Stitched) -> Generator[Pass, Results, Signals]:
        """The signals; a pass is yielded the first time."""
        if self.found is None:
            results = yield probe(stitched)
            self.found = read(stitched, results)
        return self.found


class Drawn(Selector):
    """A random set of one prompt's tokens. covered_S: the part of each signal that the last set has."""

    measures = MEASURES

    def __init__(self, once: Once, random: np.random.Generator):
        self.covered_S = np.zeros(len(NAMES))
        self._once = once
        self._random = random

    def choose(self, stitched: Stitched, count: int) -> Choice:
        """At most one pass."""
        found = yield from self._once.of(stitched)
        chosen = self._draw(found, count)
        self.covered_S = found.covered(chosen)
        return chosen

    def _draw(self, found: Signals, count: int) -> Tokens:
        mixture_S = self._random.dirichlet(np.full(len(NAMES), EVEN))
        factor_N = np.exp(self._random.normal(0.0, self._random.choice(SPREAD), len(found.tokens)))
        return top(mixture_S @ found.share_SN * factor_N, found.tokens, count)


class Told(Weighted):
    """As `Weighted`, on one prompt whose signals are kept."""

    def __init__(self, weights: Mapping[str, float], once: Once):
        super().__init__(weights)
        self._once = once

    def choose(self, stitched: Stitched, count: int) -> Choice:
        """At most one pass."""
        found = yield from self._once.of(stitched)
        return self.highest(found, count)
