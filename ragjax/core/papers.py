"""The settings of five papers: `ragjax serve --paper NAME` sets a table's options, and any flag beside it overrides.

docs/flags.md shows the tables. What a paper's setting has in common with ragjax's defaults is not in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from ragjax.core.options import EngineOptions, StorageOptions

PaperName = Literal["ragcache", "cachecraft", "fusionrag", "depcache", "graphkv"]


@dataclass(frozen=True)
class PaperOption:
    """An option as a paper has it. option: a field of `EngineOptions` or `StorageOptions`. section: of the paper."""

    option: str
    value: Any
    section: str
    reason: str


PAPERS: Mapping[PaperName, tuple[PaperOption, ...]] = {
    "ragcache": (
        PaperOption("strategy", "prefix", "5.1", "the knowledge tree is a prefix tree of documents"),
        PaperOption("policy", "pgdsf", "5.1", "formulas 1 to 3, Algorithm 1"),
        PaperOption("keep", "documents", "4", "it caches the tensors of retrieved documents"),
        PaperOption("order", "ratio:window=32", "5.2, 7.3", "cached to computed length, in a window of 32"),
        PaperOption("speculate", "4:max_prefill=4", "5.3, 7.1", "four stages, as in Figure 11; Algorithm 2"),
        PaperOption("index", "ivf:lists=1024", "7", "IVF with 1024 clusters"),
        PaperOption("top_k", 2, "7", "documents of a request"),
        PaperOption("max_running", 4, "7.1", "batch size"),
    ),
    "cachecraft": (
        PaperOption("strategy", "craft-focus", "3.2", "formulas 3 to 15; Algorithm 1 stops early"),
        PaperOption("craft_variants", "fill", "3.3", "a variant for each new prefix, until there are N times M"),
        PaperOption("policy", "craft", "3.3", "what is reused least, by f_r, leaves"),
        PaperOption("top_k", 5, "5", "chunks of a request in Sys-X"),
    ),
    "fusionrag": (
        PaperOption("strategy", "fusion", "3.2, 4.1", "query-guided selection over preprocessed chunks"),
        PaperOption("recompute_ratio", 0.15, "5", "share of the tokens that is computed again"),
        PaperOption("preprocess", True, "3.1", "chunks are prepared behind ten similar ones"),
    ),
    "depcache": (
        PaperOption("strategy", "dependency-preorder", "3.1", "Algorithm 1: a prefix tree in pre-order"),
        PaperOption("policy", "lacr:alpha=0.2,half_life=inf", "4.2.2", "formula 6; all past requests count alike"),
        PaperOption("max_running", 4, "6.2", "batch size"),
    ),
    "graphkv": (
        PaperOption("strategy", "full", "5.1", "every token of the prompt is computed"),
        PaperOption("compression", "snapkv+graphkv:512", "4, 5.2, 6", "512 tokens; mutual decay, one round, per head"),
    ),
}


def paper_options(name: PaperName, **given: Any) -> EngineOptions:
    """Options of an engine as a paper has them, but for those that are given: fields of both classes of options."""
    chosen = {one.option: one.value for one in PAPERS[name]} | given
    kept = {one.name for one in fields(StorageOptions)}
    storage = {option: chosen.pop(option) for option in tuple(chosen) if option in kept}
    return EngineOptions(**chosen, storage=StorageOptions(**storage))
