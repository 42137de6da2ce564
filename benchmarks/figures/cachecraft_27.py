"""Cache-Craft, Figure 27: answers by length of the context, which grows by larger chunks or by more chunks.

The paper, at 30% recomputed: quality grows with the chunks' size up to 0.92; with their number it grows to 0.91 and
then falls, because focus errs among too many chunks; without focus it does not fall. Here the first p passages of a
question, p = 5, 10 and 20, are p chunks (`more`), or are joined to five chunks (`larger`): the same text, so the same
length. `craft` at 30% is without focus, `craft-focus` with it. Past requests are made of the same chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common.plot import Panel, label
from benchmarks.common.report import Row
from benchmarks.figures.base import Figure, Setup, mean
from benchmarks.quality.dataset import QuestionSet
from benchmarks.quality.evaluation import NAIVE, Setting, Style
from ragjax.core import Document

SET = "musique"
PASSAGES = (5, 10, 20)
CHUNKS = 5
"""Chunks of a prompt whose chunks are large."""
RATIO = 0.3
SETTINGS = (NAIVE, Setting("craft", RATIO), Setting("craft-focus", RATIO))
TOKENS = 2048
"""Most tokens of a chunk: none is cut."""
KEYS = ("rougeL_vs_full", "kl", "recomputed_share", "prompt_tokens")


def joined(passages: Sequence[Document], chunks: int) -> Iterator[Document]:
    """The passages in so many documents, as equal in number as can be; titles stand in the text."""
    for part in np.array_split(np.arange(len(passages)), chunks):
        mine = [passages[i] for i in part]
        text = "\n".join(f"{p.title}: {p.text}" if p.title else p.text for p in mine)
        yield Document("+".join(p.id for p in mine), text)


def shaped(questions: QuestionSet, passages: int, chunks: int, limit: int) -> QuestionSet:
    """The first questions that have so many passages, these in so many chunks."""
    whole = [q for q in questions.questions if len(q.passages) >= max(PASSAGES)][:limit]
    made = [replace(q, passages=tuple(joined(q.passages[:passages], chunks))) for q in whole]
    return QuestionSet(questions.name, tuple(made), {p.id: p for q in made for p in q.passages})


def rows_of(name: str, way: str, chunks: int, samples: Sequence[dict[Setting, dict[str, Any]]]) -> list[Row]:
    """A row for each setting."""
    rows: list[Row] = []
    for setting in SETTINGS:
        row: dict[str, Any] = {"set": name, "way": way, "chunks": chunks, "strategy": setting.strategy}
        row |= {"ratio": setting.ratio, "n": len(samples)}
        for key in KEYS:
            row |= mean([float(s[setting][key]) for s in samples], key)
        rows.append(row)
    return rows


def measure(setup: Setup) -> list[Row]:
    """A row for each way, length and strategy."""
    rows: list[Row] = []
    questions = setup.questions(SET)
    if not any(len(q.passages) >= max(PASSAGES) for q in questions.questions):
        return rows
    shapes = {f"{way} {p}": (way, p) for way in ("more", "larger") for p in (PASSAGES[:2] if setup.quick else PASSAGES)}
    with setup.engine() as engine:
        for key in setup.each(list(shapes), "chunks,"):
            way, passages = shapes[key]
            chunks = passages if way == "more" else CHUNKS
            work = setup.evaluation(
                engine, shaped(questions, passages, chunks, setup.limit), Style(), whole_corpus=False,
                chunk_tokens=TOKENS,
            )  # fmt: skip
            for _ in work.teach([s.strategy for s in SETTINGS]):
                pass
            samples = [dict(work.measure(question, SETTINGS)) for question in work.questions]
            rows += rows_of(SET, way, chunks, samples)
            engine.clear_cache()
    return rows


def panels(rows: Sequence[Row]) -> list[Panel]:
    """ROUGE-L, and divergence, by tokens of the prompt."""

    def of(y: str) -> Panel:
        def panel(axes: Any) -> None:
            for way in dict.fromkeys(r["way"] for r in rows):
                for strategy in dict.fromkeys(r["strategy"] for r in rows):
                    mine = [r for r in rows if (r["way"], r["strategy"]) == (way, strategy)]
                    style = "-" if way == "more" else "--"
                    x = [r["prompt_tokens"] for r in mine]
                    text = f"{way} chunks, {strategy}"
                    axes.plot(x, [r[y] for r in mine], style, marker="o", markersize=3, label=text)
            label(axes, rows[0]["set"], "tokens of the prompt", y)

        return panel

    return [of("rougeL_vs_full"), of("kl")] if rows else []


FIGURE = Figure(
    paper="Cache-Craft, Figure 27",
    shows="answers by context length, of more chunks or of larger ones, 30% recomputed",
    differs="SmolLM2-135M; musique, up to 20 passages; both ways hold the same text",
    measure=measure,
    panels=panels,
    columns=("set", "way", "chunks", "strategy", "n", "prompt_tokens", "recomputed_share", "rougeL_vs_full",
             "rougeL_vs_full_lo", "rougeL_vs_full_hi", "kl", "kl_lo", "kl_hi"),
    limit=15,
)  # fmt: skip
