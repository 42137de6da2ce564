"""fitted: signals of a token weighed as they were found to pay off on this model; the highest are recomputed.

Ours. Each published selector looks at one signal: the attention of the last layer (`fusion`), of all layers
(`prophet`), times values (`ragjax`), places (`epic`). Which of them tells most depends on the model. Here a token's
score is a sum of its signals (`signals.py`) with weights that are not negative, fitted by `python -m
ragjax.reuse.gate --fit`: random sets of tokens are recomputed, and the fall of ln KL is regressed on the signals that
each set has, as a linear datamodel is fitted (Ilyas et al., arXiv 2202.00622). KV is as in `ragjax`: the first chunk
isolated, the others preprocessed, and none of the first chunk's tokens is recomputed while it is exact.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Pass, Results, Tokens
from ragjax.core.passes import Measure
from ragjax.reuse.anchor import anchor
from ragjax.reuse.repair import Choice, Selector
from ragjax.reuse.select import top
from ragjax.reuse.signals import MEASURES, NAMES, Signals, signals
from ragjax.reuse.stitch import Stitched

NAME = "fitted"
"""Of the strategy."""


class Weighted(Selector):
    """Tokens of the highest weighted signals.

    weights: by name; those left out are 0.

    Raises:
        ValueError: for a signal that there is not, or a weight that is negative.
    """

    measures = MEASURES

    def __init__(self, weights: Mapping[str, float]):
        unknown = [name for name in weights if name not in NAMES]
        if unknown or min(weights.values(), default=0.0) < 0:
            raise ValueError(f"weights are of {', '.join(NAMES)}, from 0 on: not {dict(weights)}")
        self.weights_S = np.array([weights.get(name, 0.0) for name in NAMES])

    def choose(self, stitched: Stitched, count: int) -> Choice:
        """One pass: the query segments over the chunks as they are, measured in all layers."""
        results = yield probe(stitched)
        found = read(stitched, results)
        return self.highest(found, count)

    def highest(self, found: Signals, count: int) -> Tokens:
        """The `count` tokens of highest score (all, if there are fewer), ascending."""
        return top(self.score(found), found.tokens, count)

    def score(self, found: Signals) -> NDArray[np.float64]:
        """Of each token, float64 [n]."""
        score_N: NDArray[np.float64] = self.weights_S @ found.share_SN
        return score_N

    def part(self, found: Signals, chosen: Tokens) -> float:
        """The share of all tokens' scores that these have; 1 if there is nothing to be had."""
        whole = float(self.score(found).sum())
        return float(self.weights_S @ found.covered(chosen)) / whole if whole > 0 else 1.0


def probe(stitched: Stitched, more: frozenset[Measure] = frozenset()) -> Pass:
    """The pass that signals are read from; with other measures besides."""
    return stitched.ask(MEASURES | more, asking=stitched.question)


def read(stitched: Stitched, results: Results) -> Signals:
    """Signals of every chunk token but those whose KV equals full attention's."""
    return signals(stitched, results, np.setdiff1d(stitched.chunks, anchor(stitched)).astype(np.int32))
