"""FusionRAG, Figure 13: normalised F1 and exact match by the share that is recomputed.

The paper: five models of 7B to 32B on TriviaQA, HotpotQA, Musique and 2WikiMultiHopQA; at 15% FusionRAG recovers 80%
of what full reuse loses in 12 of 20 cells. The packaged model answers so little that full reuse loses nearly nothing.
Normalised F1 (eq. 11) is drawn only for sets where full attention's F1 is above full reuse's by an interval that
excludes zero; F1 itself and the divergence from full attention are always drawn. The rows are those of
`benchmarks.quality`, whose stored reports `--rows` draws as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.plot import Panel
from benchmarks.common.report import Row
from benchmarks.figures.answers import answers
from benchmarks.figures.base import Figure, Setup
from benchmarks.quality.plot import by_ratio

SETS = ("hotpotqa", "nq_open")
STRATEGIES = ("blend", "craft", "fusion", "ragjax")
RATIOS = (0.0, 0.05, 0.1)


def measure(setup: Setup) -> list[Row]:
    """Rows of parts "main" and "sweep"."""
    return answers(setup, SETS[:1] if setup.quick else SETS, STRATEGIES, ratios=RATIOS)


def loses(rows: Sequence[Row]) -> set[str]:
    """The sets in which full reuse loses F1 beyond the interval."""
    reuse = [r for r in rows if r["part"] == "sweep" and r["strategy"] == "naive"]
    return {r["set"] for r in reuse if r["f1_minus_full_hi"] is not None and r["f1_minus_full_hi"] < 0}


def panels(rows: Sequence[Row]) -> list[Panel]:
    """A line for each strategy."""
    told = loses(rows)
    return [
        *by_ratio("normalised_f1")([r for r in rows if r["set"] in told]),
        *by_ratio("f1", "em", "kl")([r for r in rows if r["set"] != "pooled"]),
    ]


FIGURE = Figure(
    paper="FusionRAG, Figure 13",
    shows="F1, normalised where full reuse loses any, exact match, and divergence, by recomputed share",
    differs="SmolLM2-135M instead of models of 7B to 32B; hotpotqa and nq_open; few questions",
    measure=measure,
    panels=panels,
    columns=("set", "part", "strategy", "ratio", "n", "normalised_f1", "normalised_f1_lo", "normalised_f1_hi", "f1",
             "em", "kl", "kl_lo", "kl_hi"),
    limit=25,
)  # fmt: skip
