"""Replacement policies side by side on generated and recorded requests, each beside what no policy can pass.

Workloads: graph entities under three access patterns (DepCache, section 6.1), repeated questions over documents at
top-k of 1 to 5, and 3 kept of 5 (RAGCache, sections 7 and 8), or Mooncake's traces. Capacities:
10, 20 and 40% of the data's distinct tokens (documents: 5% too), or token counts for Mooncake. Each is served by the
device alone, and by a device of a fifth with host memory of the other four. `bound` is the highest token hit rate that
single tokens allow, `min` that of Belady's MIN; `belady` is a policy that knows all that will be asked, in the tree.

`--through cache` sends RAGCache's requests through what the engine runs, the strategy `prefix` on the real cache, by
what is kept (`ragjax serve --keep`) and the length of answers. `--orders` serves from a queue of 32 waiting requests in
every order that the server has, under some of the policies.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import report
from benchmarks.common.profiles import load
from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.common.samples import Samples
from benchmarks.policies import orders, replay
from benchmarks.policies.cell import NAMES, Bounds, Cell, cells, effort, limited, modelled, serve, workloads
from benchmarks.policies.simulator import LOOKAHEAD
from benchmarks.policies.source import PATTERNS
from ragjax.cache.profile import Profile
from ragjax.commands.flags import integer

COLUMNS = (
    "workload", "top_k", "keep", "capacity_tokens", "host_tokens", "policy", "token_hit_rate", "bound", "min",
    "document_hit_rate", "document_bound", "recomputed_tokens", "prefill_s", "moved_bytes", "decision_us",
)  # fmt: skip


def measure(planned: Sequence[Cell], profile: Profile, samples: Samples) -> Iterator[dict[str, Any]]:
    """Every policy in every cell."""
    bounds: dict[tuple[int, int], Bounds] = {}  # one for all cells of a workload and capacity

    def row(cell: Cell, name: str) -> dict[str, Any]:
        limits = bounds.setdefault((id(cell.work), cell.capacity), Bounds(cell.work, cell.capacity))
        return {**serve(cell, name, profile), **limits.row}

    return samples.rows({f"{cell.name} policy={name}": partial(row, cell, name) for cell in planned for name in NAMES})


def means(rows: Sequence[report.Row]) -> list[dict[str, Any]]:
    """For each group of workloads and policy: means over workloads and capacities, and gains of LACR and PGDSF.

    Of the device alone. lacr_gain, pgdsf_gain: of its hit rate (documents: document hit rate) over this policy's.
    """
    found: list[dict[str, Any]] = []
    for group, members in _groups(rows).items():
        figure = "document_hit_rate" if group.startswith("documents") else "token_hit_rate"
        mean = {
            name: float(np.mean([r[figure] for r in members if r["policy"] == name]))
            for name in dict.fromkeys(r["policy"] for r in members)
        }
        best = float(np.mean([r["min"] for r in members]))
        for name, value in mean.items():
            row = {"workload": group, "policy": name, "figure": figure, "mean": value}
            row["of_min"] = value / best if figure == "token_hit_rate" and best else None
            for other in ("lacr", "pgdsf"):
                row[f"{other}_gain"] = mean[other] / value - 1 if value and other in mean else None
            found.append(row)
    return found


def _groups(rows: Sequence[report.Row]) -> dict[str, list[report.Row]]:
    groups: dict[str, list[report.Row]] = {}
    for row in rows:
        if row["host_tokens"]:
            continue
        name = "entities" if row["workload"] in PATTERNS else row["workload"]
        if row["top_k"] is not None:
            name += f" top-{row['top_k']}" + (f", {row['keep']} kept" if row["keep"] else "")
        groups.setdefault(name, []).append(row)
    return groups


def options(flags: Parser) -> None:
    folder = "a folder with kg/, text/ and traces/, or some"
    flags.add("--data", type=report.existing_folder, required=True, metavar="DIR", help=folder)
    flags.add("--orders", action="store_true", help="every order under some of the policies")
    through = "the real cache serves requests for documents, or a simulator serves all (%(default)s)"
    flags.add("--through", choices=("simulator", "cache"), default="simulator", help=through)
    flags.add("--limit", type=integer(1), metavar="N", help="at most N questions a text set, N requests a workload")
    flags.add("--profile", type=Path, metavar="FILE", help="a measured cost profile; modelled without")


def columns(chosen: Namespace) -> Sequence[str]:
    return (orders if chosen.orders else replay).COLUMNS if chosen.orders or chosen.through == "cache" else COLUMNS


def measured(chosen: Namespace, session: Session) -> Iterable[Mapping[str, Any]]:
    profile = modelled() if chosen.profile is None else load(chosen.profile)
    how = orders if chosen.orders else replay if chosen.through == "cache" else None
    much = limited((how.effort if how else effort)(chosen.quick), chosen.limit)
    planned = list(cells(workloads(chosen, much)))
    print(f"costs: {profile.measured_on or chosen.profile}; lookahead {LOOKAHEAD}")
    asked = {"data": str(chosen.data), "limit": chosen.limit, "quick": chosen.quick}
    asked |= {"orders": chosen.orders, "through": chosen.through, "profile": asdict(profile)}
    return (how.measure if how else measure)(planned, profile, session.samples(asked))


def show(rows: Sequence[Mapping[str, Any]], chosen: Namespace) -> None:
    if chosen.through == "cache":
        return
    found = orders.gains(rows) if chosen.orders else means(rows)
    print("\n" + report.table(found, tuple(found[0]) if found else ()))


main = Benchmark("policies", __doc__, columns, measured, options, show=show).main

if __name__ == "__main__":
    sys.exit(main())
