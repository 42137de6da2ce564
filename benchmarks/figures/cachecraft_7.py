"""Cache-Craft, Figure 7: the more chunks stand before a chunk, the further its output is from what it is alone.

The paper compares the last layer's hidden states of a chunk behind i - 1 other chunks with those of the chunk alone
(section 2.4). Here a question's first passage is computed behind the first k of its other passages, k = 0 to 9, in
full attention. The deviation is that of the last layer's values, relative to the norm of the chunk alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.common.plot import Panel, label
from benchmarks.common.report import Row
from benchmarks.figures.base import Figure, Setup, mean, means
from benchmarks.figures.observe import PAST_QUESTION, Observer, moved

SETS = ("2wikimultihopqa", "nq_open")
BEFORE = (0, 1, 2, 3, 5, 7, 9)


def measure(setup: Setup) -> list[Row]:
    """A row for each set and number of chunks before."""
    rows: list[Row] = []
    with setup.engine() as engine:
        look = Observer(engine)
        for name in setup.each(SETS[:1] if setup.quick else SETS, "set"):
            whole = [q for q in setup.questions(name).questions if len(q.passages) > max(BEFORE)]
            found: dict[int, list[list[float]]] = {k: [] for k in BEFORE}
            for question in whole[: setup.limit]:
                own, *others = [look.chunk(passage) for passage in question.passages]
                alone = look.see(look.prompt(PAST_QUESTION, [own]))
                base = alone.values(alone.chunks[0])
                for k in BEFORE:
                    seen = look.see(look.prompt(PAST_QUESTION, [*others[:k], own]))
                    found[k].append(moved(seen.values(seen.chunks[-1]), base))
            rows += [row(name, k, layers) for k, layers in found.items() if layers]
    return rows


def row(name: str, before: int, layers: Sequence[Sequence[float]]) -> dict[str, Any]:
    """layers: of each question, the deviation by layer."""
    made: dict[str, Any] = {"set": name, "chunks_before": before, "n": len(layers)}
    return made | mean([each[-1] for each in layers], "deviation") | {"by_layer": means(layers)}


def panels(rows: Sequence[Row]) -> list[Panel]:
    """By the number of chunks before, and by layer."""

    def last(axes: Any) -> None:
        for name in dict.fromkeys(r["set"] for r in rows):
            mine = [r for r in rows if r["set"] == name]
            x, y = [r["chunks_before"] for r in mine], np.array([r["deviation"] for r in mine])
            axes.plot(x, y, marker="o", markersize=3, label=name)
            axes.fill_between(x, [r["deviation_lo"] for r in mine], [r["deviation_hi"] for r in mine], alpha=0.2)
        axes.set_ylim(bottom=0)
        label(axes, "last layer, 95% intervals", "chunks before", "deviation from the chunk alone")

    def layers(axes: Any) -> None:
        for r in rows:
            if r["set"] == rows[0]["set"]:
                axes.plot(range(1, len(r["by_layer"]) + 1), r["by_layer"], label=f"{r['chunks_before']} before")
        label(axes, rows[0]["set"], "layer", "deviation from the chunk alone")

    return [last, layers]


FIGURE = Figure(
    paper="Cache-Craft, Figure 7",
    shows="deviation of a chunk's output with more chunks before it",
    differs="values of the last layer for hidden states, relative to the chunk alone; 2wikimultihopqa and nq_open",
    measure=measure,
    panels=panels,
    columns=("set", "chunks_before", "n", "deviation", "deviation_lo", "deviation_hi"),
    limit=12,
)
