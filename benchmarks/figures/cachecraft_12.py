"""Cache-Craft, Figures 12 and 14: what tells how far a reused chunk is off, and how few tokens that rests on.

Figure 12: output deviation of reused chunks by CCI, 1 - beta and gamma (eqs. 6, 7 and 11). The fifth passage of a
question is computed behind its four first (the new prefix), and behind other prefixes (the old ones): some of the
four replaced by passages of other questions, in order (beta falls, gamma is 0), or all four in another order (beta is
1, gamma grows). CCI, beta and gamma are those that Cache-Craft would keep of the old one; the deviation is that of
the last layer's values, between the two. The paper's figure says "1 - gamma", and its text that a higher gamma is
worse.

Figure 14: of the attention that a chunk gave to the chunks before it, which CCI sums up, the part that its tokens
with most of it have (eq. 14: these are recomputed first). `cci_without` is CCI if these tokens had given none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.common.plot import Panel, label
from benchmarks.common.report import Row
from benchmarks.figures.base import Figure, Setup, mean
from benchmarks.figures.observe import PAST_QUESTION, Observer, moved
from ragjax.core import Chunk
from ragjax.reuse.influence import Influence, before, disorder

SETS = ("2wikimultihopqa", "nq_open")
PREFIX = 4
"""Chunks before the one that is looked at."""
ORDERS = 3
"""Other orders of the same prefix that are tried."""
SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
BINS = 4
"""Groups of equal size that the trials are put into, by what they are compared by."""


@dataclass(frozen=True)
class Trial:
    """A chunk that was computed behind an old prefix and is reused behind a new one."""

    cci: float
    beta: float
    gamma: float
    deviation: float
    influence: Influence


def prefixes(own: Sequence[Chunk], foreign: Sequence[Chunk], seed: int) -> Iterator[list[Chunk]]:
    """Old prefixes of a new one: 1 to all chunks replaced by foreign ones at random places; other orders of its own."""
    random = np.random.default_rng(seed)
    for replaced in range(1, len(own) + 1):
        places = set(random.permutation(len(own))[:replaced].tolist())
        yield [foreign[i] if i in places else chunk for i, chunk in enumerate(own)]
    for _ in range(ORDERS):
        yield [own[i] for i in random.permutation(len(own))]


def trials(look: Observer, setup: Setup, name: str) -> list[Trial]:
    """All trials of a set."""
    whole = [q for q in setup.questions(name).questions if len(q.passages) > PREFIX]
    asked = whole[: setup.limit]
    found = []
    for number, question in enumerate(asked):
        *own, target = [look.chunk(passage) for passage in question.passages[: PREFIX + 1]]
        other = whole[(number + (len(asked) % len(whole) or 1)) % len(whole)]
        foreign = [look.chunk(passage) for passage in other.passages[:PREFIX]]
        new = look.see(look.prompt(PAST_QUESTION, [*own, target]))
        at = new.chunks[-1]
        prior = before(new.prompt, at)
        for old in prefixes(own, foreign, number):
            seen = look.see(look.prompt(PAST_QUESTION, [*old, target]))
            influence = seen.influence(seen.chunks[-1])
            far = moved(seen.values(seen.chunks[-1]), new.values(at))[-1]
            overlap, order = influence.overlap(prior), disorder(influence.before, prior)
            found.append(Trial(influence.cci, overlap, order, far, influence))
    return found


def binned(name: str, by: str, x: Sequence[float], y: Sequence[float], bins: int = BINS) -> list[dict[str, Any]]:
    """Trials in groups of equal size by ascending x; equal values stay together. A row each, means of x and y."""
    order = np.argsort(x, kind="stable")
    sorted_x = np.asarray(x, np.float64)[order]
    cuts = [int(np.searchsorted(sorted_x, sorted_x[i * len(order) // bins])) for i in range(bins)]
    groups = [g for g in np.split(order, sorted(set(cuts) - {0})) if len(g)]
    correlation = float(np.corrcoef(x, y)[0, 1]) if np.std(x) > 1e-12 and np.std(y) > 1e-12 else None
    return [
        {"set": name, "by": by, "x": float(np.mean(np.asarray(x)[g])), "n": len(g), "correlation": correlation}
        | mean([y[i] for i in g], "deviation")
        for g in groups
    ]


def carried(influence: Influence, shares: Sequence[float]) -> list[tuple[float, float]]:
    """For each share of the tokens, those with most attention to what stood before them: their part of it, and CCI
    if they had given none.
    """
    ranked = influence.score_T[influence.ranking].astype(np.float64)
    found = []
    for share in shares:
        part = float(ranked[: int(np.ceil(share * len(ranked) - 1e-9))].sum() / ranked.sum())
        left = replace(influence, inter_LZ=influence.inter_LZ * np.float32(max(0.0, 1 - part)))
        found.append((part, left.cci))
    return found


def rows_of(name: str, made: Sequence[Trial]) -> list[Row]:
    """Of both figures."""
    y = [t.deviation for t in made]
    rows: list[Row] = [*binned(name, "cci", [t.cci for t in made], y)]
    alike = [t for t in made if t.gamma == 0]
    rows += binned(name, "1 - beta", [1 - t.beta for t in alike], [t.deviation for t in alike])
    same = [t for t in made if t.beta > 1 - 1e-6]
    rows += binned(name, "gamma", [t.gamma for t in same], [t.deviation for t in same])
    parts = [carried(t.influence, SHARES) for t in made]
    for i, share in enumerate(SHARES):
        row = {"set": name, "by": "tokens", "x": share, "n": len(made)}
        row |= mean([p[i][0] for p in parts], "carried") | mean([p[i][1] for p in parts], "cci_without")
        rows.append(row | mean([t.cci for t in made], "cci"))
    return rows


def measure(setup: Setup) -> list[Row]:
    """Rows by CCI, 1 - beta, gamma, and by share of tokens."""
    rows: list[Row] = []
    with setup.engine() as engine:
        look = Observer(engine)
        for name in setup.each(SETS[:1] if setup.quick else SETS, "set"):
            rows += rows_of(name, trials(look, setup, name))
    return rows


def _curve(rows: Sequence[Row], by: str, y: str, x_label: str, y_label: str) -> Panel:
    def panel(axes: Any) -> None:
        for name in dict.fromkeys(r["set"] for r in rows):
            mine = [r for r in rows if r["set"] == name and r["by"] == by]
            x = [r["x"] for r in mine]
            axes.plot(x, [r[y] for r in mine], marker="o", markersize=3, label=name)
            axes.fill_between(x, [r[f"{y}_lo"] for r in mine], [r[f"{y}_hi"] for r in mine], alpha=0.2)
        label(axes, "", x_label, y_label)

    return panel


def panels_12(rows: Sequence[Row]) -> list[Panel]:
    """By CCI, by 1 - beta, by gamma."""
    return [_curve(rows, by, "deviation", by, "deviation of the output") for by in ("cci", "1 - beta", "gamma")]


def panels_14(rows: Sequence[Row]) -> list[Panel]:
    """The part of the attention, and CCI without it."""
    x = "share of the chunk's tokens, those with most first"
    return [
        _curve(rows, "tokens", "carried", x, "share of the attention to chunks before"),
        _curve(rows, "tokens", "cci_without", x, "CCI if these tokens had given none"),
    ]


def _figure(number: int, shows: str, panels: Any) -> Figure:
    return Figure(
        paper=f"Cache-Craft, Figure {number}",
        shows=shows,
        differs="values of the last layer for hidden states; prefixes of four passages that are varied on purpose",
        measure=measure,
        panels=panels,
        columns=("set", "by", "x", "n", "deviation", "deviation_lo", "deviation_hi", "correlation", "carried", "cci",
                 "cci_without"),
        limit=12,
    )  # fmt: skip


FIGURE_12 = _figure(12, "deviation of a reused chunk's output by CCI, 1 - beta and gamma", panels_12)
FIGURE_14 = _figure(14, "the part of CCI that the tokens recomputed first have", panels_14)
