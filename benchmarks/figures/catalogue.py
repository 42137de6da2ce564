"""The figures by name, and the figures that other commands draw."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.figures import (
    cachecraft_7,
    cachecraft_8,
    cachecraft_12,
    cachecraft_16,
    cachecraft_20,
    cachecraft_21,
    cachecraft_25,
    cachecraft_26,
    cachecraft_27,
    fusionrag_3,
    fusionrag_7a,
    fusionrag_13,
    fusionrag_14a,
    fusionrag_16,
    fusionrag_17,
)
from benchmarks.figures.base import Figure

FIGURES: Mapping[str, Figure] = {
    "fusionrag_3": fusionrag_3.FIGURE,
    "fusionrag_7a": fusionrag_7a.FIGURE,
    "fusionrag_13": fusionrag_13.FIGURE,
    "fusionrag_14a": fusionrag_14a.FIGURE,
    "fusionrag_16": fusionrag_16.FIGURE,
    "fusionrag_17": fusionrag_17.FIGURE,
    "cachecraft_7": cachecraft_7.FIGURE,
    "cachecraft_8": cachecraft_8.FIGURE,
    "cachecraft_12": cachecraft_12.FIGURE_12,
    "cachecraft_14": cachecraft_12.FIGURE_14,
    "cachecraft_16": cachecraft_16.FIGURE_16,
    "cachecraft_17": cachecraft_16.FIGURE_17,
    "cachecraft_20": cachecraft_20.FIGURE,
    "cachecraft_21": cachecraft_21.FIGURE,
    "cachecraft_25": cachecraft_25.FIGURE,
    "cachecraft_26": cachecraft_26.FIGURE,
    "cachecraft_27": cachecraft_27.FIGURE,
}
"""By name: the paper and the number."""

ELSEWHERE: Mapping[str, str] = {
    "FusionRAG 8": "quality --deviation N --plot DIR",
    "FusionRAG 15": "load --figure fusionrag_15",
    "FusionRAG 18": "quality --neighbours 10,0 --plot DIR",
    "Cache-Craft 6": "characterise --plot FILE.png",
    "Cache-Craft 15, Table 3": "quality --plot DIR",
    "Cache-Craft 22": "load --figure cachecraft_22",
    "Cache-Craft 24": "load --figure cachecraft_24",
    "Cache-Craft 29": "preload --plot DIR",
    "Cache-Craft Table 1": "quality --rivals map-reduce,llmlingua-2",
    "RAGCache 2 to 4": "cost --out FILE",
    "RAGCache 5, 6": "characterise --encoder --plot FILE.png",
    "RAGCache 13 to 16, 18": "load --figure ragcache_13 (ragcache_14, ...)",
    "RAGCache 19, Table 3": "speculate",
    "DepCache 4": "characterise --plot FILE.png",
    "DepCache 11": "load --figure depcache_11",
    "DepCache 13": "policies --orders --plot FILE.png",
}
"""By paper and number: the command and its flags, as `python -m benchmarks.` has it."""
