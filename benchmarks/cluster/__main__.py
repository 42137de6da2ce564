"""Routers of 4 to 1,024 replicas, simulated: tokens found, evenness of queues, time of a decision, a router's bytes.

    python -m benchmarks.cluster [--data DIR] [--replicas 4,16,64] [--quick] [--json FILE]

There is no model: a replica holds chunks, and computes what it lacks at a fixed rate (`benchmarks.cluster.simulation`).
Four chunks a request, in random order. zipf, temporal: patterns of `benchmarks.policies`; each chunk is drawn by
itself, so no replica can hold what belongs together. zipf-topics, temporal-topics: the pattern draws a topic of eight
chunks, and the request gets four of these, as neighbours in an index are. Of DIR, Mooncake's traces: blocks of 512
tokens that depend on all blocks before them; arrivals are random as those of the others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.simulation import Outcome, Setting, needs, simulate, traced
from benchmarks.common import report
from benchmarks.policies.source import mooncake
from benchmarks.policies.workload import PATTERNS, Pattern
from ragjax.cluster.router import ROUTERS
from ragjax.cluster.router.need import Need

WORKLOADS = {"zipf": 1, "temporal": 1, "zipf-topics": 8, "temporal-topics": 8}
"""Chunks of a topic, by workload."""
COLUMNS = (
    *("workload", "replicas", "router", "delay_s", "found", "over_round_robin", "ttft_p50_s", "ttft_p95_s"),
    *("uneven_p50", "uneven_p99", "decide_p50_us", "decide_p99_us", "state_bytes"),
)
TRACED = 2_000
"""Requests of a trace, at most."""


def row(workload: str, replicas: int, router: str, outcome: Outcome, delay_s: float = 0.0) -> dict[str, Any]:
    """One line of the report. found: share of tokens; uneven: fullest queue over the mean, while requests wait."""

    def at(values: Sequence[float], share: float) -> float | None:
        return float(np.quantile(values, share)) if values else None

    return {
        "workload": workload,
        "replicas": replicas,
        "router": router,
        "delay_s": delay_s,
        "found": outcome.found / outcome.asked,
        "ttft_p50_s": at(outcome.waits_s, 0.5),
        "ttft_p95_s": at(outcome.waits_s, 0.95),
        "uneven_p50": at(outcome.uneven, 0.5),
        "uneven_p99": at(outcome.uneven, 0.99),
        "decide_p50_us": at(outcome.decide_us, 0.5),
        "decide_p99_us": at(outcome.decide_us, 0.99),
        "state_bytes": outcome.state_bytes,
    }


def workloads(counts: Sequence[int], requests: int, data: Path | None) -> Iterator[tuple[str, Setting, list[Need]]]:
    """Name, setting and requests of each workload, with each number of replicas."""
    for workload, topic in WORKLOADS.items():
        for count in counts:
            pattern = PATTERNS[workload.removesuffix("-topics")]
            setting = Setting(pattern, count, topic=topic, requests=max(20, min(requests, 20_000 // count)))
            yield workload, setting, list(needs(setting))
    for path in sorted(data.glob("traces/mooncake_*.jsonl")) if data else ():
        trace = mooncake(path).limited(min(TRACED, 10 * requests))
        served = traced(trace)
        for count in counts:
            yield trace.name, Setting(Pattern(), count), served


def measure(counts: Sequence[int], requests: int, data: Path | None) -> Iterator[dict[str, Any]]:
    """All routers on all workloads; and ours where it learns late, with the fewest replicas."""
    for workload, setting, served in workloads(counts, requests, data):
        base, count = None, setting.replicas
        for name in ("round-robin", *(n for n in ROUTERS if n != "round-robin")):
            made = row(workload, count, name, simulate(setting, served, ROUTERS[name]()))
            base = base or made["found"]
            yield {**made, "over_round_robin": made["found"] / base if base else None}
            print(f"{workload}, {count} replicas, {name}: {made['found']:.3f} found", file=sys.stderr)
        if count == min(counts):
            for delay_s in (1.0, 30.0):
                late = simulate(setting, served, ROUTERS["knowledge"](), delay_s=delay_s)
                made = row(workload, count, "knowledge", late, delay_s)
                yield {**made, "over_round_robin": made["found"] / base if base else None}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    flags = report.parser("cluster", __doc__)
    flags.add_argument("--replicas", type=_counts, default=None, metavar="N,…", help="(4,16,64,256,1024)")
    flags.add_argument(
        "--data", type=report.existing_folder, metavar="DIR", help="a folder with traces/mooncake_*.jsonl"
    )
    chosen = flags.parse_args(arguments)
    if chosen.data and not [*chosen.data.glob("traces/mooncake_*.jsonl")]:
        flags.error(f"--data: {chosen.data} holds no traces/mooncake_*.jsonl")
    counts = chosen.replicas or ([2, 4] if chosen.quick else [4, 16, 64, 256, 1024])
    requests = 200 if chosen.quick else 2_000
    return report.run("cluster", COLUMNS, chosen.json, lambda _: measure(counts, requests, chosen.data))


def _counts(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if not found or min(found) < 1:
        raise ValueError
    return found


if __name__ == "__main__":
    sys.exit(main())
