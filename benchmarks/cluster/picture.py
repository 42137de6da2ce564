"""Simulated routers by number of replicas, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import plot
from benchmarks.common.report import Row

COSTS = {
    "uneven_p99": ("fullest queue over the mean, 99%", "linear"),
    "decide_p50_us": ("a decision, median, µs", "log"),
    "state_bytes": ("bytes that a router keeps", "log"),
}
"""What a router costs: how its axis is called, and its scale."""


def draw(rows: Sequence[Row], file: Path) -> None:
    """Tokens found, one panel for each workload; then what routers cost, as the worst of the workloads."""
    kept = [row for row in rows if not row["delay_s"]]
    workloads = dict.fromkeys(row["workload"] for row in kept)
    found = [
        _panel([row for row in kept if row["workload"] == name], "found", name, "share of tokens found", "linear")
        for name in workloads
    ]
    plot.save([*found, *(_panel(kept, column, "the worst workload", *how) for column, how in COSTS.items())], file)


def _panel(rows: Sequence[Row], column: str, title: str, y: str, scale: str) -> plot.Panel:
    """A line for each router: its largest value, by the number of replicas."""
    counts = sorted({row["replicas"] for row in rows})

    def panel(axes: Any) -> None:
        for router in dict.fromkeys(row["router"] for row in rows):
            own = [row for row in rows if row["router"] == router and row[column] is not None]
            most = [max((r[column] for r in own if r["replicas"] == count), default=None) for count in counts]
            axes.plot(counts, most, marker="o", markersize=3, label=router)
        axes.set_xscale("log", base=2)
        axes.set_yscale(scale)
        plot.label(axes, title, "replicas", y)

    return panel
