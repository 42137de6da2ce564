"""Answers of strategies beside full attention's, measured as `benchmarks.quality` measures them."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.report import Row
from benchmarks.common.samples import Progress
from benchmarks.figures.base import Setup
from benchmarks.quality.evaluation import Style
from benchmarks.quality.rows import Question, main_settings, rows, sweep_settings
from benchmarks.quality.run import measure
from ragjax.reuse import strategies as all_strategies

RATIO = 0.15
NEIGHBOURS = 10
"""What both papers recompute, and the neighbours that FusionRAG preprocesses a chunk behind."""


def answers(
    setup: Setup,
    sets: Sequence[str],
    strategies: Sequence[str],
    *,
    ratio: float = RATIO,
    ratios: Sequence[float] = (),
    neighbours: Sequence[int] = (),
    max_tokens: int = 16,
) -> list[Row]:
    """Rows of `benchmarks.quality.rows`, on the first `setup.limit` questions of each set.

    strategies: besides `full` and `naive`. ratio: of the rows of part "main". ratios, neighbours: others, which make
    the parts "sweep" and "neighbours".
    """
    selective = frozenset(name for name, s in all_strategies().items() if s.selective)
    main = main_settings(strategies, selective, ratio, NEIGHBOURS)
    sweep = sweep_settings(main, ratios, neighbours) if ratios or neighbours else []
    measured: dict[str, list[Question]] = {}
    progress = Progress(setup.limit * len(sets))
    with setup.engine() as engine:
        for name in sets:
            work = setup.evaluation(engine, setup.questions(name), Style(max_tokens=max_tokens))
            swept = len(work.questions) if sweep else 0
            measured[name] = measure(work, main, sweep, setup.samples, progress, swept=swept)
    return list(rows(measured, main, sweep, setup.model))
