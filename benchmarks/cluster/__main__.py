"""Replicas that serve, by each router.

Servers are real ones: `python -m ragjax.serve --replicas N` with each router, on Ray (`ragjax[ray]`), with a Redis
server as the shared tier (`ragjax[remote]`). Requests have four passages of the demo's documents, or of DIR's nq_open,
in random order, drawn by the patterns zipf and temporal of `benchmarks.policies`; in zipf-topics the pattern draws a
topic, which is eight passages in a row, and the request gets four of these. A replica's pool holds about a third of all
passages, and nothing lies below it but the shared tier. The strategy is `naive`, so that what is found is the router's
doing. `--clients` wait for their answers, or arrivals are Poisson's at `--rate`. Behind its loads each server answers
some requests with `prefix`, twice; their texts are compared with those of a single replica. At the end one of two
`round-robin` replicas is killed: the table `newcomer` has the share found by the one that takes its place and by its
neighbour, between points of its requests. A server starts Ray on this machine, which refuses more replicas than it has
cores; `ray start --head --num-cpus 4` makes a cluster that does not, for `--ray-address`. Times of replicas that share
the cores of one machine say nothing of replicas that have a device each.
"""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from dataclasses import asdict
from typing import Any

import benchmarks.baseline  # noqa: F401 (registers its names)
from benchmarks.cluster import fleet, trial
from benchmarks.common import report
from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.common.samples import weights_of
from ragjax.commands.flags import integer, positive
from ragjax.core import ConfigError


def serve(chosen: Namespace, session: Session) -> list[dict[str, Any]]:
    """Rows of replicas that serve.

    Raises:
        ConfigError: there is no Ray, or DIR lacks what is asked.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("cluster needs Ray, which is not installed: pip install '.[ray]' in ragjax's folder")
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


def options(flags: Parser) -> None:
    names = ", ".join(fleet.WORKLOADS)
    flags.add("--replicas", type=_counts, metavar="N,…", help="servers of so many (2,4; 2 with --quick)")
    flags.add("--data", type=report.existing_folder, metavar="DIR", help="a folder with text/nq_open")
    many = flags.add_mutually_exclusive_group().add_argument
    many("--clients", type=integer(1, 1000), metavar="N", help="how many wait for answers (4)")
    many("--rate", type=positive, metavar="X", help="requests a second, whatever becomes of those before")
    flags.add("--workloads", type=_workloads, metavar="NAME,…", help=f"of {names} (all; zipf with --quick)")
    flags.add("--requests", type=integer(1), metavar="N", help="requests that count (32; 6 with --quick)")
    flags.add("--warm", type=integer(1), metavar="N", help="requests before those (16; 4 with --quick)")
    flags.add("--shared-tier", choices=("with", "without"), help="only servers with it, or without (both)")
    flags.add("--device-cache-gb", type=positive, metavar="GB", help="KV pool of each, 2^30 bytes (0.1)")
    flags.add("--ray-address", metavar="HOST:PORT", help="of a cluster that runs (each server starts one)")


main = Benchmark("cluster", __doc__, trial.COLUMNS, serve, options).main


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
