"""Figures like DepCache's, of `graphrag`'s rows; none is drawn without rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common.plot import Figures, Panel, Panels, bars, label, lines
from benchmarks.common.report import Row


def _of(rows: Sequence[Row], part: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for r in rows:
        if r["part"] == part:
            found.setdefault(r["set"], []).append(r)
    return found


def _named(r: Row) -> str:
    return r["method"] if r.get("positions") is None else f"{r['method']}/{r['positions']}"


def _redundancy(rows: Sequence[Row]) -> Iterator[Panel]:
    """Shares of self-attention's pairs: visited, left out as no ancestors, left out as said once."""
    kinds = ("visited_share", "non_dependent", "shared_prefix")
    for name, found in _of(rows, "work").items():

        def panel(axes: Any, name: str = name, found: Sequence[Row] = found) -> None:
            below = [0.0] * len(found)
            for kind in kinds:
                shares = [r[kind] for r in found]
                axes.bar(range(len(found)), shares, bottom=below, label=kind.replace("_", " "))
                below = [b + s for b, s in zip(below, shares, strict=True)]
            axes.plot(range(len(found)), [r["predicted_share"] for r in found], "k_", label="visited, predicted")
            labels = [f"≥{r['least_tokens']}" for r in found]
            axes.set_xticks(range(len(found)), labels, fontsize=7)
            label(axes, name, "tokens written out", "share of pairs")

        yield panel


def _lengths(rows: Sequence[Row]) -> Iterator[Panel]:
    for name, found in _of(rows, "length").items():
        yield from filter(None, [lines(
            found, name, "written_tokens", "ttft_ms", _named, x_label="tokens written out", logarithmic="xy"
        )])  # fmt: skip


def _per_set(part: str, *values: str) -> Panels:
    def panels(rows: Sequence[Row]) -> Iterator[Panel]:
        for name, found in _of(rows, part).items():
            yield from filter(None, (bars(found, name, y, list(map(_named, found))) for y in values))

    return panels


FIGURES: Figures = {
    "depcache_3": ("Pairs of tokens that attend to each other, of self-attention's", _redundancy),
    "depcache_10": ("Time to first token over a stream of requests", _per_set("workload", "ttft_ms", "hit_rate")),
    "depcache_12": ("Time to first token by prompt length", _lengths),
}
