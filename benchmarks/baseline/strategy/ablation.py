"""Ablations: Cache-Craft without beta or without CCI (Figure 26)."""

from __future__ import annotations

from collections.abc import Sequence

from ragjax.reuse import STRATEGIES
from ragjax.reuse.craft import Craft
from ragjax.reuse.influence import Influence


class WithoutBeta(Craft):
    """CCI alone: what stands before the chunk makes no difference."""

    def overhead(self, influence: Influence, prior: Sequence[bytes]) -> float:
        return influence.cci


class WithoutCCI(Craft):
    """1 - adjusted overlap alone: every chunk counts as shaped by its context alike."""

    def overhead(self, influence: Influence, prior: Sequence[bytes]) -> float:
        return influence.novelty(prior)


STRATEGIES.add("craft-nobeta", lambda model: WithoutBeta("craft-nobeta"))
STRATEGIES.add("craft-nocci", lambda model: WithoutCCI("craft-nocci"))
