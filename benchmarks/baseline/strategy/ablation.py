"""Ablations: Cache-Craft without beta or without CCI (Figure 26), and FusionRAG with a softmax for each chunk.

FusionRAG does not say whether the softmax of its selection runs over all keys, as in `fusion`, or over each chunk by
itself, as in `fusion-chunk`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragjax.core import Measure
from ragjax.reuse import STRATEGIES, ModelTraits
from ragjax.reuse.craft import Craft
from ragjax.reuse.fusion import Fused, QueryGuided
from ragjax.reuse.influence import Influence
from ragjax.reuse.repair import Selective


def without_beta(influence: Influence, prior: Sequence[bytes]) -> float:
    """CCI alone: what stands before the chunk makes no difference (Cache-Craft, Figure 26)."""
    return influence.cci


def without_cci(influence: Influence, prior: Sequence[bytes]) -> float:
    """1 - adjusted overlap alone: every chunk counts as shaped by its context alike (Cache-Craft, Figure 26)."""
    return influence.novelty(prior)


class ChunkGuided(QueryGuided):
    """Tokens that the question attends to most at the last layer, with a softmax over each chunk by itself."""

    measures = frozenset({Measure.CHUNK_SCORE})


@STRATEGIES.register("craft-nobeta")
def craft_nobeta(model: ModelTraits) -> Craft:
    return Craft("craft-nobeta", overhead=without_beta)


@STRATEGIES.register("craft-nocci")
def craft_nocci(model: ModelTraits) -> Craft:
    return Craft("craft-nocci", overhead=without_cci)


@STRATEGIES.register("fusion-chunk")
def fusion_chunk(model: ModelTraits) -> Selective:
    return Selective("fusion-chunk", Fused(), ChunkGuided())
