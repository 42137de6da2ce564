"""Pictures of a run's rows: by rate, and of closed loops; panels side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import Row

Panel = Callable[[Any], None]  # draws on the axes it is given
ACROSS = 4  # panels in a line of a picture
LINES = ("ttft_mean_ms", "ttft_p99_ms", "itl_p99_ms", "found_share")
GROUPS = ("ttft_mean_ms", "ttft_p99_ms", "requests_per_s", "found_share")
BARS = ("requests_per_s", "tokens_per_s", "ttft_mean_ms", "itl_p99_ms")


def draw(rows: Sequence[Row], folder: Path, name: str, title: str) -> None:
    """Write those of the two pictures that the rows have data for."""
    for file, told, panels in (
        (name, title, by_rate(rows)),
        (f"{name}_clients", f"{title}, clients that wait", by_clients(rows)),
    ):
        found = list(panels)
        if found:
            save(found, folder / f"{file}.png", told)


def save(panels: Sequence[Panel], file: Path, title: str) -> None:
    from matplotlib.figure import Figure

    across, down = min(len(panels), ACROSS), -(-len(panels) // ACROSS)
    picture = Figure(figsize=(5 * across, 4 * down), layout="tight")
    for place, panel in enumerate(panels, 1):
        panel(picture.add_subplot(down, across, place))
    picture.suptitle(title)
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(file, dpi=120)
    print(f"wrote {file}", file=sys.stderr)


def by_rate(rows: Sequence[Row]) -> Iterator[Panel]:
    open_loop = [r for r in rows if r["rate"]]
    if len({r["rate"] for r in open_loop}) == 1:
        yield from (_groups(open_loop, y) for y in GROUPS if any(r[y] is not None for r in open_loop))
        return
    for workload in dict.fromkeys(r["workload"] for r in open_loop):
        found = [r for r in open_loop if r["workload"] == workload]
        yield from (_lines(found, workload, y) for y in LINES if any(r[y] is not None for r in found))


def by_clients(rows: Sequence[Row]) -> Iterator[Panel]:
    closed = [r for r in rows if r["concurrency"]]
    for workload in dict.fromkeys(r["workload"] for r in closed):
        found = [r for r in closed if r["workload"] == workload]
        yield from (_bars(found, workload, y) for y in BARS if any(r[y] is not None for r in found))


def _lines(rows: Sequence[Row], title: str, y: str) -> Panel:
    """A line for each system, over ascending rates."""

    def panel(axes: Any) -> None:
        for system in dict.fromkeys(r["system"] for r in rows):
            points = sorted((r["rate"], r[y]) for r in rows if r["system"] == system and r[y] is not None)
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=system)
        if y.endswith("_ms"):
            axes.set_yscale("log")
        label(axes, title, "requests a second that arrive", y)

    return panel


def _groups(rows: Sequence[Row], y: str) -> Panel:
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


def _bars(rows: Sequence[Row], title: str, y: str) -> Panel:
    kept = [r for r in rows if r[y] is not None]
    names = [f"{r['system']} ({r['concurrency']})" for r in kept]

    def panel(axes: Any) -> None:
        axes.bar(range(len(kept)), [r[y] for r in kept])
        axes.set_xticks(range(len(kept)), names, rotation=30, ha="right", fontsize=7)
        axes.set_title(title, fontsize=9)
        axes.set_ylabel(y.replace("_", " "))

    return panel


def label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x.replace("_", " "))
    axes.set_ylabel(y.replace("_", " "))
    axes.legend(fontsize=6)
