"""Routers of replicas: 4 to 1,024 that are simulated, or a few that serve.

Simulated are tokens found, evenness of queues, time of a decision and a router's bytes. There is no model: a replica
holds chunks, and computes what it lacks at a fixed rate (`benchmarks.cluster.simulation`). Four chunks a request, in
random order. zipf, temporal: patterns of `benchmarks.policies`; each chunk is drawn by itself, so no replica can hold
what belongs together. zipf-topics, temporal-topics: the pattern draws a topic of eight chunks, and the request gets
four of these, as neighbours in an index are. Of DIR, Mooncake's traces: blocks of 512 tokens that depend on all blocks
before them; arrivals are random as those of the others.

Replicas that serve are real ones: `python -m ragjax.serve --replicas N` with each router, on Ray (`ragjax[ray]`), with
a Redis server as the shared tier (`ragjax[remote]`). Requests have four passages of the demo's documents, or of DIR's
nq_open, in random order, drawn as above; a topic is eight passages in a row. A replica's pool holds about a third of
all passages, and nothing lies below it but the shared tier. The strategy is `naive`, so that what is found is the
router's doing. `--clients` wait for their answers, or arrivals are Poisson's at `--rate`. Behind its loads each server
answers some requests with `prefix`, twice; their texts are compared with those of a single replica. At the end one of
two `round-robin` replicas is killed: the table `newcomer` has the share found by the one that takes its place and by
its neighbour, between points of its requests. A server starts Ray on this machine, which refuses more replicas than it
has cores; `ray start --head --num-cpus 4` makes a cluster that does not, for `--ray-address`. Times of replicas that
share the cores of one machine say nothing of replicas that have a device each.
"""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import benchmarks.baseline  # noqa: F401 (registers its names)
from benchmarks.cluster import fleet, trial
from benchmarks.cluster.simulation import Outcome, Setting, needs, simulate, traced
from benchmarks.common import plot, report
from benchmarks.common.report import Benchmark, Parser, Row, Session
from benchmarks.common.samples import weights_of
from benchmarks.policies.source import PATTERNS, Pattern, mooncake
from ragjax.cluster.router import ROUTERS, Need
from ragjax.commands.flags import integer, positive
from ragjax.core import ConfigError

WORKLOADS = {"zipf": 1, "temporal": 1, "zipf-topics": 8, "temporal-topics": 8}  # chunks of a topic, by workload
COLUMNS = (
    *("workload", "replicas", "router", "found", "over_round_robin", "ttft_p50_s", "ttft_p95_s"),
    *("uneven_p50", "uneven_p99", "decide_p50_us", "decide_p99_us", "state_bytes"),
)
TRACED = 2_000  # requests of a trace, at most


def row(workload: str, replicas: int, router: str, outcome: Outcome) -> dict[str, Any]:
    """One line of the report. found: share of tokens; uneven: fullest queue over the mean, while requests wait."""

    def at(values: Sequence[float], share: float) -> float | None:
        return float(np.quantile(values, share)) if values else None

    return {
        "workload": workload, "replicas": replicas, "router": router,
        "found": outcome.found / outcome.asked, "ttft_p50_s": at(outcome.waits_s, 0.5),
        "ttft_p95_s": at(outcome.waits_s, 0.95), "uneven_p50": at(outcome.uneven, 0.5),
        "uneven_p99": at(outcome.uneven, 0.99), "decide_p50_us": at(outcome.decide_us, 0.5),
        "decide_p99_us": at(outcome.decide_us, 0.99), "state_bytes": outcome.state_bytes,
    }  # fmt: skip


def workloads(counts: Sequence[int], requests: int, data: Path | None) -> Iterator[tuple[str, Setting, list[Need]]]:
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
    for workload, setting, served in workloads(counts, requests, data):
        base, count = None, setting.replicas
        for name in ("round-robin", *(n for n in ROUTERS if n != "round-robin")):
            made = row(workload, count, name, simulate(setting, served, ROUTERS[name]()))
            base = base or made["found"]
            yield {**made, "over_round_robin": made["found"] / base if base else None}
            print(f"{workload}, {count} replicas, {name}: {made['found']:.3f} found", file=sys.stderr)


def serve(chosen: Namespace, session: Session) -> list[dict[str, Any]]:
    """Rows of replicas that serve.

    Raises:
        ConfigError: there is no Ray, or DIR lacks what is asked.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--part replicas needs Ray, which is not installed: pip install '.[ray]' in ragjax's folder")
    quick = chosen.quick
    plan = trial.Plan(
        requests=chosen.requests or (6 if quick else 32), warm=chosen.warm or (4 if quick else 16),
        clients=chosen.clients or 4, rate=chosen.rate, points=2 if quick else 10, step=2 if quick else 5,
        device_cache_gb=chosen.device_cache_gb or 0.1,
    )  # fmt: skip
    bench = trial.Bench(plan, *fleet.source(chosen.data), chosen.ray_address)
    counts = chosen.replicas or ([2] if quick else [2, 4])
    workloads = chosen.workloads or list(fleet.WORKLOADS)[: 1 if quick else None]
    samples = session.samples(
        {**asdict(plan), "workloads": workloads, "data": str(chosen.data), "weights": weights_of(report.MODEL)}
    )
    rows: list[dict[str, Any]] = []
    reference: dict[str, str] = {}
    for case in trial.cases(counts, workloads, quick, chosen.shared_tier):
        kept = samples.of(str(case), lambda case=case: bench.measure(case))  # type: ignore[misc]
        reference = reference or kept["texts"]
        rows += [{**row, **trial.compared(kept["texts"], reference)} for row in kept["rows"]]
        session.tables["newcomer"] = [*session.tables.get("newcomer", ()), *kept["curve"]]
    return rows


def draw(made: Sequence[Row], file: Path) -> None:
    """Tokens found, one panel for each workload; then what routers cost, as the worst of the workloads."""
    costs = {"uneven_p99": "fullest queue over the mean, 99%", "decide_p50_us": "a decision, median, µs",
             "state_bytes": "bytes that a router keeps"}  # fmt: skip
    found = [
        plot.lines([r for r in made if r["workload"] == name], name, "replicas", "found", "router",
                   y_label="share of tokens found", logarithmic="x")
        for name in dict.fromkeys(r["workload"] for r in made)
    ]  # fmt: skip
    found += [
        plot.lines(made, "the worst workload", "replicas", column, "router", y_label=text, most=True,
                   logarithmic="x" if column == "uneven_p99" else "xy")
        for column, text in costs.items()
    ]  # fmt: skip
    plot.save([panel for panel in found if panel is not None], file)


def options(flags: Parser) -> None:
    names = ", ".join(fleet.WORKLOADS)
    flags.add("--part", choices=("simulation", "replicas"), default="simulation", help="what to measure")
    flags.add("--replicas", type=_counts, metavar="N,…", help="(4,16,64,256,1024; replicas: 2,4)")
    flags.add("--data", type=report.existing_folder, metavar="DIR", help="a folder with traces/ and text/nq_open")
    many = flags.add_mutually_exclusive_group().add_argument
    many("--clients", type=integer(1, 1000), metavar="N", help="replicas: how many wait for answers (4)")
    many("--rate", type=positive, metavar="X", help="replicas: requests a second, whatever becomes of those before")
    flags.add("--workloads", type=_workloads, metavar="NAME,…", help=f"replicas: of {names} (all; zipf with --quick)")
    flags.add("--requests", type=integer(1), metavar="N", help="replicas: requests that count (32; 6 with --quick)")
    flags.add("--warm", type=integer(1), metavar="N", help="replicas: requests before those (16; 4 with --quick)")
    flags.add("--shared-tier", choices=("with", "without"), help="replicas: only servers with it, or without (both)")
    flags.add("--device-cache-gb", type=positive, metavar="GB", help="replicas: KV pool of each, 2^30 bytes (0.1)")
    flags.add("--ray-address", metavar="HOST:PORT", help="replicas: of a cluster that runs (each server starts one)")
    flags.add("--plot", type=report.writable, metavar="FILE.png", help="simulation: also draw the rows by replicas")


def check(flags: Parser, chosen: Namespace) -> None:
    if chosen.part == "replicas":
        if chosen.plot:
            flags.error("--plot is a flag of --part simulation")
        return
    for name in ("clients", "rate", "workloads", "requests", "warm", "shared_tier", "device_cache_gb", "ray_address"):
        if getattr(chosen, name) is not None:
            flags.error(f"--{name.replace('_', '-')} is a flag of --part replicas")
    if chosen.data and not [*chosen.data.glob("traces/mooncake_*.jsonl")]:
        flags.error(f"--data: {chosen.data} holds no traces/mooncake_*.jsonl")


def rows(chosen: Namespace, session: Session) -> Iterable[dict[str, Any]]:
    if chosen.part == "replicas":
        return serve(chosen, session)
    counts = chosen.replicas or ([2, 4] if chosen.quick else [4, 16, 64, 256, 1024])
    return measure(counts, 200 if chosen.quick else 2_000, chosen.data)


main = Benchmark(
    "cluster", __doc__, lambda chosen: trial.COLUMNS if chosen.part == "replicas" else COLUMNS, rows, options,
    check=check, show=lambda made, chosen: draw(made, chosen.plot) if chosen.plot else None,
).main  # fmt: skip


def _counts(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if not found or min(found) < 1:
        raise ValueError
    return found


def _workloads(text: str) -> list[str]:
    found = text.split(",")
    if len({*found}) < len(found) or not fleet.WORKLOADS.keys() >= {*found}:
        raise ValueError
    return found


if __name__ == "__main__":
    sys.exit(main())
