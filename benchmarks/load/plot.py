"""Pictures of the rows: time to first token and what was found by rate, requests a second by system."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common.plot import Figures, Panel, bars, label
from benchmarks.common.report import Row

LINES = ("ttft_mean_ms", "ttft_p99_ms", "itl_p99_ms", "found_share")
BARS = ("requests_per_s", "tokens_per_s", "ttft_mean_ms", "itl_p99_ms")


def _by_rate(rows: Sequence[Row]) -> Iterator[Panel]:
    for workload in dict.fromkeys(r["workload"] for r in rows):
        found = [r for r in rows if r["workload"] == workload and r["rate"]]
        for y in LINES:
            if any(r[y] is not None for r in found):
                yield _lines(found, workload, y)


def _lines(rows: Sequence[Row], workload: str, y: str) -> Panel:
    def panel(axes: Any) -> None:
        for system in dict.fromkeys(r["system"] for r in rows):
            points = sorted((r["rate"], r[y]) for r in rows if r["system"] == system and r[y] is not None)
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=system)
        if y.endswith("_ms"):
            axes.set_yscale("log")
        label(axes, workload, "requests a second that arrive", y)

    return panel


def _by_clients(rows: Sequence[Row]) -> Iterator[Panel]:
    for workload in dict.fromkeys(r["workload"] for r in rows):
        found = [r for r in rows if r["workload"] == workload and r["concurrency"]]
        names = [f"{r['system']} ({r['concurrency']})" for r in found]
        yield from filter(None, (bars(found, workload, y, names) for y in BARS if found))


def figures(name: str, title: str) -> Figures:
    """The pictures of a run: by rate, and of closed loops."""
    return {name: (title, _by_rate), f"{name}_clients": (f"{title}, clients that wait", _by_clients)}
