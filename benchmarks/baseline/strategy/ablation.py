"""Ablations: Cache-Craft without beta or without CCI (Figure 26)."""

from __future__ import annotations

from collections.abc import Sequence

from ragjax.reuse import STRATEGIES, ModelTraits
from ragjax.reuse.craft import Craft
from ragjax.reuse.influence import Influence


def without_beta(influence: Influence, prior: Sequence[bytes]) -> float:
    """CCI alone: what stands before the chunk makes no difference (Cache-Craft, Figure 26)."""
    return influence.cci


def without_cci(influence: Influence, prior: Sequence[bytes]) -> float:
    """1 - adjusted overlap alone: every chunk counts as shaped by its context alike (Cache-Craft, Figure 26)."""
    return influence.novelty(prior)


@STRATEGIES.register("craft-nobeta")
def craft_nobeta(model: ModelTraits) -> Craft:
    return Craft("craft-nobeta", overhead=without_beta)


@STRATEGIES.register("craft-nocci")
def craft_nocci(model: ModelTraits) -> Craft:
    return Craft("craft-nocci", overhead=without_cci)
