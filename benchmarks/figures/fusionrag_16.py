"""FusionRAG, Figure 16: token selections over isolated chunks, and over chunks preprocessed behind similar ones.

The paper: preprocessing gains 21 to 49% of the score for CacheBlend and 43 to 46% for Cache-Craft on TriviaQA and
2WikiMultiHopQA, and Query-Guided Selection stays ahead by 3 to 18%. Here the first score is the divergence from full
attention, which a small model does not blur; F1 and ROUGE-L with full attention's answers stand beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.plot import Panel, bars
from benchmarks.common.report import Row
from benchmarks.figures.answers import answers
from benchmarks.figures.base import Figure, Setup

SETS = ("nq_open", "hotpotqa")
STRATEGIES = ("blend", "fusion+blend", "craft", "fusion+craft", "fusion")
LABELS = ("CacheBlend", "preprocessed + CacheBlend", "Cache-Craft", "preprocessed + Cache-Craft", "FusionRAG")


def measure(setup: Setup) -> list[Row]:
    """Rows of part "main"."""
    return answers(setup, SETS[:1] if setup.quick else SETS, STRATEGIES)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """A bar for each selection, without and with preprocessing."""
    made = []
    for name in dict.fromkeys(r["set"] for r in rows):
        found = {r["strategy"]: r for r in rows if r["set"] == name and r["part"] == "main"}
        chosen = [(found[s], text) for s, text in zip(STRATEGIES, LABELS, strict=True) if s in found]
        kept = [bars([r for r, _ in chosen], name, y, [text for _, text in chosen]) for y in ("kl", "rougeL_vs_full")]
        made += [panel for panel in kept if panel is not None]
    return made


FIGURE = Figure(
    paper="FusionRAG, Figure 16",
    shows="selections of 15% without and with preprocessing",
    differs="SmolLM2-135M; nq_open for TriviaQA, hotpotqa; divergence and ROUGE-L against full attention instead of F1",
    measure=measure,
    panels=panels,
    columns=("set", "part", "strategy", "ratio", "n", "kl", "kl_lo", "kl_hi", "rougeL_vs_full", "f1", "em"),
    limit=25,
)
