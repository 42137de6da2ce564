"""FusionRAG, Figure 7a: chunks that a question retrieves are among each other's most similar chunks.

The paper retrieves, for each chunk, its n most similar chunks, and asks how probable it is that other chunks of the
same question are among them: above 50% at n = 2 and above 80% at n = 10. It does not say how many chunks a question
has, and whether one of the others suffices. Here a question has its five most similar chunks of the whole corpus.
`any` is the share of these chunks that have at least one of the other four among their n nearest, `each` the share of
the other four that are there. `chance` is `any` if the n nearest were drawn from the corpus at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.common.plot import Panel, label
from benchmarks.common.report import Row
from benchmarks.figures.base import Figure, Setup, mean

SETS = ("hotpotqa", "nq_open")
NEAREST = (1, 2, 3, 5, 10, 20)
TOGETHER = 5
"""Chunks that a question retrieves."""


def found(retrieved: Sequence[str], nearest: Sequence[Sequence[str]], n: int) -> tuple[float, float]:
    """Of one question: share of its chunks with another among their n nearest, and mean share of others there.

    nearest: of each retrieved chunk, the chunks most similar to it, best first, itself left out.
    """
    there = [
        [other in near[:n] for other in retrieved if other != own] for own, near in zip(retrieved, nearest, strict=True)
    ]
    return float(np.mean([any(hits) for hits in there])), float(np.mean(there))


def chance(corpus: int, together: int, n: int) -> float:
    """Probability that n chunks drawn from a corpus without its own hold one of the `together` - 1 others."""
    others, missed = corpus - 1, 1.0
    for drawn in range(min(n, others)):
        missed *= max(0, others - (together - 1) - drawn) / (others - drawn)
    return 1 - missed


def measure(setup: Setup) -> list[Row]:
    """A row for each set and n."""
    rows: list[Row] = []
    encoder = setup.encoder()
    with setup.engine() as engine:
        for name in setup.each(SETS[:1] if setup.quick else SETS, "set"):
            work = setup.evaluation(engine, setup.questions(name))
            similar = work.similarity
            shares: dict[int, list[tuple[float, float]]] = {n: [] for n in NEAREST}
            for vector in encoder.encode([question.text for question in work.questions]):
                retrieved = [chunk.id for chunk in similar.search(vector, TOGETHER)]
                nearest = [[c.id for c in similar.neighbours(key, max(NEAREST))] for key in retrieved]
                for n in NEAREST:
                    shares[n].append(found(retrieved, nearest, n))
            rows += [row(name, n, pairs, len(similar.chunks)) for n, pairs in shares.items()]
    return rows


def row(name: str, n: int, pairs: Sequence[tuple[float, float]], corpus: int) -> dict[str, Any]:
    """The means over questions."""
    made = {"set": name, "nearest": n, "n": len(pairs), "chunks": corpus}
    made |= mean([whether for whether, _ in pairs], "any") | mean([share for _, share in pairs], "each")
    return made | {"chance": chance(corpus, TOGETHER, n)}


def panels(rows: Sequence[Row]) -> list[Panel]:
    """One panel."""

    def panel(axes: Any) -> None:
        for i, name in enumerate(dict.fromkeys(r["set"] for r in rows)):
            mine = [r for r in rows if r["set"] == name]
            x = [r["nearest"] for r in mine]
            for y, style in (("any", "o-"), ("each", "o--"), ("chance", "o:")):
                axes.plot(x, [r[y] for r in mine], style, color=f"C{i}", markersize=3, label=f"{name}: {y}")
        axes.set_ylim(0, 1)
        label(axes, "other chunks of the question among a chunk's nearest", "nearest chunks looked at", "share")

    return [panel]


FIGURE = Figure(
    paper="FusionRAG, Figure 7a",
    shows="how often chunks that a question retrieves are among each other's n most similar chunks",
    differs="all-MiniLM-L6-v2 instead of BGE-M3, five chunks a question, hotpotqa and nq_open",
    measure=measure,
    panels=panels,
    columns=("set", "nearest", "n", "chunks", "any", "any_lo", "any_hi", "each", "chance"),
    limit=200,
    quick=20,
)
