"""FusionRAG, Figure 17: the number of similar chunks that a chunk is preprocessed behind.

The paper varies top-n on TriviaQA and 2WikiMultiHopQA with Qwen2.5-7B at several recomputed shares: n = 10 is best,
15 is worse on TriviaQA, and on 2WikiMultiHopQA from 5% on. Here `fusion` behind 1, 5, 10 and 15 neighbours, and
behind none, at 0 and 15%; the score is the divergence from full attention (F1 is in the rows).
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.plot import Panel
from benchmarks.common.report import Row
from benchmarks.figures.answers import answers
from benchmarks.figures.base import Figure, Setup
from benchmarks.quality.plot import by_neighbours

SETS = ("nq_open", "hotpotqa")
NEIGHBOURS = (0, 1, 5, 15)
"""Besides ten."""


def measure(setup: Setup) -> list[Row]:
    """Rows of parts "main", "sweep" and "neighbours"."""
    return answers(
        setup, SETS[:1] if setup.quick else SETS, ("fusion",), ratios=(0.0,),
        neighbours=NEIGHBOURS[:2] if setup.quick else NEIGHBOURS,
    )  # fmt: skip


def panels(rows: Sequence[Row]) -> list[Panel]:
    """By the number of neighbours, a line for each share."""
    return list(by_neighbours("kl", "rougeL_vs_full")(rows))


FIGURE = Figure(
    paper="FusionRAG, Figure 17",
    shows="divergence by the number of neighbours that chunks are preprocessed behind",
    differs="SmolLM2-135M; nq_open for TriviaQA, hotpotqa; divergence from full attention instead of F1",
    measure=measure,
    panels=panels,
    columns=("set", "part", "strategy", "ratio", "neighbours", "n", "kl", "kl_lo", "kl_hi", "rougeL_vs_full", "f1"),
    limit=25,
)
