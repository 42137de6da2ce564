"""Cache-Craft, Figure 20: ROUGE-L against full recomputation's answers, by the share that is recomputed.

The paper: LLaMA-3-8B and 70B on 2WikiMQA, MuSiQue, SQuAD, DROP, CNN, XSUM and Sys-X. Full-Cache has 0.65 on multi-hop
sets, Cache-Craft 30% more at 20% recomputed and 42% more at 30%; random tokens can be worse than none; Prefix-Cache
and Set-Cache recompute 65 to 95%. Here one multi-hop and one single-hop set, and the same baselines: `naive`
(Full-Cache), `random`, `h2o`, `prefix`, `set-cache`, `craft`.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.plot import Panel
from benchmarks.common.report import Row
from benchmarks.figures.answers import answers
from benchmarks.figures.base import Figure, Setup
from benchmarks.quality.plot import against_cost

SETS = ("hotpotqa", "squad_xquad_en")
STRATEGIES = ("prefix", "set-cache", "random", "h2o", "craft")
RATIO = 0.3
RATIOS = (0.15, 0.6)


def measure(setup: Setup) -> list[Row]:
    """Rows of parts "main" and "sweep"."""
    return answers(setup, SETS[:1] if setup.quick else SETS, STRATEGIES, ratio=RATIO, ratios=RATIOS, max_tokens=24)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """A line for each strategy."""
    return list(against_cost("rougeL_vs_full", "kl")([r for r in rows if r["set"] != "pooled"]))


FIGURE = Figure(
    paper="Cache-Craft, Figure 20",
    shows="ROUGE-L against full recomputation's answers by recomputed share",
    differs="SmolLM2-135M; hotpotqa and squad_xquad_en; answers of 24 tokens",
    measure=measure,
    panels=panels,
    columns=("set", "part", "strategy", "ratio", "n", "recomputed_share", "rougeL_vs_full", "rougeL_vs_full_lo",
             "rougeL_vs_full_hi", "kl"),
    limit=20,
)  # fmt: skip
