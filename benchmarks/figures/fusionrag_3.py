"""FusionRAG, Figure 3: how much KV deviation is left when the worst tokens are recomputed, and where it lies.

3a: KV deviation (eq. 7) at the second layer, between full attention and full reuse (`naive`). The tokens are sorted
by it as an oracle would, and the part of it that is left after the first share is drawn. The paper, on one question
of Musique and three models: over 50% is left at 15%. 3b: the paper's tokens deviate most at the beginning of chunks
and in later chunks; the mean deviation by place in the chunk and by the chunk's place, in tenths, and the tokens of
one question. Chunks preprocessed behind their ten most similar ones (`fusion`, nothing recomputed) stand beside,
which is Figure 7b: there the deviation falls by 70%. Keys are compared at equal rotation; keys and values count
apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.plot import Panel, label
from benchmarks.common.report import Row
from benchmarks.figures.base import Figure, Setup, mean, means
from benchmarks.quality.evaluation import FULL, NAIVE, Setting, Style
from benchmarks.quality.probe import Floats
from ragjax.core import Kind, Prompt

SETS = ("hotpotqa",)
FUSED = Setting("fusion", 0.0, 10)
LAYER = 1
"""The second layer."""
SHARES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
TENTHS = 10
WINDOW = 8
"""Tokens of the example that are drawn as one point."""

Deviations = NDArray[np.float64]


def deviations(exact: Floats, other: Floats) -> Deviations:
    """Squared distance of each token's keys, or values, at the second layer, float64 [tokens] (eq. 7)."""
    gap: Deviations = np.square(other[LAYER] - exact[LAYER]).sum((1, 2), dtype=np.float64)
    return gap


def left(deviation_N: Deviations, shares: Sequence[float]) -> list[float]:
    """The part that is left when the share of the tokens with most of it has none any more."""
    ranked = np.concatenate([[0.0], np.cumsum(np.sort(deviation_N)[::-1])])
    counts = [int(np.ceil(share * len(deviation_N) - 1e-9)) for share in shares]
    return [float(1 - ranked[count] / ranked[-1]) for count in counts]


def places(prompt: Prompt, deviation_N: Deviations) -> tuple[list[float], list[float]]:
    """Mean deviation by tenth of the chunk, and by tenth of the chunks, over the mean of all tokens."""
    chunks = [i for i, segment in enumerate(prompt.segments) if segment.kind is Kind.CHUNK]
    lengths = [len(prompt.segments[i]) for i in chunks]
    within = np.concatenate([np.arange(n) * TENTHS // n for n in lengths])
    among = np.repeat(np.arange(len(chunks)) * TENTHS // len(chunks), lengths)
    whole = float(deviation_N.mean())

    def by(group_N: NDArray[np.integer]) -> list[float]:
        found = [deviation_N[group_N == tenth] for tenth in range(TENTHS)]
        return [float(g.mean()) / whole if len(g) else float("nan") for g in found]

    return by(within), by(among)


def rows_of(name: str, found: Mapping[str, Sequence[tuple[Prompt, Deviations, float]]]) -> list[Row]:
    """found: by "strategy/of", each question's prompt, deviations, and the sum of `naive`'s on it."""
    rows: list[Row] = []
    for key, questions in found.items():
        strategy, of = key.split("/")
        head: dict[str, Any] = {"set": name, "strategy": strategy, "of": of, "n": len(questions)}
        curves = [left(deviation_N, SHARES) for _, deviation_N, _ in questions]
        part = mean([float(deviation_N.sum()) / whole for _, deviation_N, whole in questions], "over_naive")
        for i, share in enumerate(SHARES):
            rows.append(head | {"part": "left", "share": share} | mean([c[i] for c in curves], "left") | part)
        within, among = zip(*(places(prompt, deviation_N) for prompt, deviation_N, _ in questions), strict=True)
        rows.append(head | {"part": "places", "place_in_chunk": means(within), "place_of_chunk": means(among)} | part)
        rows.append(head | {"part": "tokens"} | example(*questions[0][:2]))
    return rows


def example(prompt: Prompt, deviation_N: Deviations) -> dict[str, Any]:
    """The tokens of one question, a mean for each window, and where its chunks begin."""
    lengths = [len(segment) for segment in prompt.segments if segment.kind is Kind.CHUNK]
    whole = len(deviation_N) // WINDOW * WINDOW
    points = deviation_N[:whole].reshape(-1, WINDOW).mean(1)
    return {"tokens": [round(float(x), 5) for x in points], "begins": [0, *np.cumsum(lengths[:-1]).tolist()]}


def measure(setup: Setup) -> list[Row]:
    """Rows of all parts."""
    rows: list[Row] = []
    settings = [NAIVE] if setup.quick else [NAIVE, FUSED]
    with setup.engine() as engine:
        for name in SETS:
            work = setup.evaluation(engine, setup.questions(name), Style(max_tokens=1))
            found: dict[str, list[tuple[Prompt, Deviations, float]]] = {}
            for i in map(int, setup.each([str(i) for i in range(len(work.questions))], "question")):
                question = work.questions[i]
                work.prepare(question, settings)
                exact, whole = work.probed(question, FULL).kv, [0.0, 0.0]
                for setting in settings:
                    kv = work.probed(question, setting).kv
                    assert exact is not None and kv is not None
                    for at, of in enumerate(("key", "value")):
                        gap_N = deviations(exact[at], kv[at])
                        whole[at] = float(gap_N.sum()) if setting == NAIVE else whole[at]
                        entry = (work.prompt(question), gap_N, whole[at])
                        found.setdefault(f"{setting.strategy}/{of}", []).append(entry)
            rows += rows_of(name, found)
    return rows


def panels(rows: Sequence[Row]) -> list[Panel]:
    """What is left; the places; one question."""

    def name(r: Row) -> str:
        return f"{r['strategy']}, {r['of']}s"

    def curves(axes: Any) -> None:
        for key in dict.fromkeys(name(r) for r in rows):
            mine = [r for r in rows if name(r) == key and r["part"] == "left"]
            axes.plot([r["share"] for r in mine], [r["left"] for r in mine], marker="o", markersize=3, label=key)
        axes.axvline(0.15, color="k", linestyle=":", linewidth=0.7)
        label(axes, "3a: second layer", "share of tokens recomputed, oracle", "deviation left")

    def profile(y: str, x: str) -> Panel:
        def panel(axes: Any) -> None:
            for r in rows:
                if r["part"] == "places":
                    axes.plot(range(1, TENTHS + 1), r[y], marker="o", markersize=3, label=name(r))
            label(axes, "3b: where it lies", x, "deviation over the mean")

        return panel

    def tokens(axes: Any) -> None:
        for r in rows:
            if r["part"] == "tokens" and r["of"] == "key":
                axes.plot(np.arange(len(r["tokens"])) * WINDOW, r["tokens"], linewidth=0.8, label=name(r))
                for begin in r["begins"]:
                    axes.axvline(begin, color="k", linewidth=0.3)
        label(axes, "3b: one question; lines are beginnings of chunks", "token of the chunks", "deviation of the key")

    places_of = [profile("place_in_chunk", "tenth of the chunk"), profile("place_of_chunk", "tenth of the chunks")]
    return [curves, *places_of, tokens]


FIGURE = Figure(
    paper="FusionRAG, Figure 3",
    shows="KV deviation of the second layer that an oracle leaves, and where it lies; preprocessed chunks (7b) beside",
    differs="SmolLM2-135M on hotpotqa instead of one question of Musique on three models; keys and values apart",
    measure=measure,
    panels=panels,
    columns=("set", "strategy", "of", "part", "n", "share", "left", "left_lo", "left_hi", "over_naive"),
    limit=8,
)
