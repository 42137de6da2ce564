"""Pictures of the rows: time to first token and what was found by rate, requests a second by system.

Where all rows have one rate, the workloads stand side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common.plot import Figures, Panel, bars, label
from benchmarks.common.report import Row

LINES = ("ttft_mean_ms", "ttft_p99_ms", "itl_p99_ms", "found_share")
GROUPS = ("ttft_mean_ms", "ttft_p99_ms", "requests_per_s", "found_share")
BARS = ("requests_per_s", "tokens_per_s", "ttft_mean_ms", "itl_p99_ms")


def _by_rate(rows: Sequence[Row]) -> Iterator[Panel]:
    open_loop = [r for r in rows if r["rate"]]
    if len({r["rate"] for r in open_loop}) == 1:
        yield from (_groups(open_loop, y) for y in GROUPS if any(r[y] is not None for r in open_loop))
        return
    for workload in dict.fromkeys(r["workload"] for r in rows):
        found = [r for r in rows if r["workload"] == workload and r["rate"]]
        for y in LINES:
            if any(r[y] is not None for r in found):
                yield _lines(found, workload, y)


def _groups(rows: Sequence[Row], y: str) -> Panel:
    """A group of bars for each workload, one bar for each system."""
    workloads = list(dict.fromkeys(r["workload"] for r in rows))
    systems = list(dict.fromkeys(r["system"] for r in rows))
    width = 0.8 / len(systems)

    def panel(axes: Any) -> None:
        for i, system in enumerate(systems):
            found = {r["workload"]: r[y] for r in rows if r["system"] == system and r[y] is not None}
            places = [workloads.index(workload) + (i + 0.5) * width - 0.4 for workload in found]
            axes.bar(places, list(found.values()), width, label=system)
        axes.set_xticks(range(len(workloads)), [name.split(":")[-1] for name in workloads], fontsize=7)
        label(axes, f"{rows[0]['rate']:g} requests a second arrive", "", y)

    return panel


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
