"""Simulated routers by number of replicas, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import plot
from benchmarks.common.report import Row

COSTS = {"uneven_p99": "fullest queue over the mean, 99%", "decide_p50_us": "a decision, µs", "state_bytes": "bytes"}
"""What a router costs, and how its axis is called."""


def draw(rows: Sequence[Row], file: Path) -> None:
    """Tokens found, one panel for each workload; then what routers cost, as the worst of the workloads."""
    prompt = [row for row in rows if not row["delay_s"]]
    routers, workloads = (list(dict.fromkeys(row[name] for row in prompt)) for name in ("router", "workload"))
    counts = sorted({row["replicas"] for row in prompt})

    def found(workload: str) -> plot.Panel:
        def panel(axes: Any) -> None:
            for router in routers:
                of = {r["replicas"]: r["found"] for r in prompt if (r["router"], r["workload"]) == (router, workload)}
                axes.plot(counts, [of.get(count) for count in counts], marker="o", markersize=3, label=router)
            axes.set_xscale("log", base=2)
            plot.label(axes, workload, "replicas", "share of tokens found")

        return panel

    def cost(column: str) -> plot.Panel:
        def panel(axes: Any) -> None:
            for router in routers:
                own = [row for row in prompt if row["router"] == router]
                most = [_most(column, [row for row in own if row["replicas"] == count]) for count in counts]
                axes.plot(counts, most, marker="o", markersize=3, label=router)
            axes.set_xscale("log", base=2)
            if column != "uneven_p99":
                axes.set_yscale("log")
            plot.label(axes, "the worst workload", "replicas", COSTS[column])

        return panel

    plot.save([*map(found, workloads), *map(cost, COSTS)], file)


def _most(column: str, rows: Sequence[Row]) -> float | None:
    """The largest value; none where requests never waited, so that there is none."""
    return max((row[column] for row in rows if row[column] is not None), default=None)
