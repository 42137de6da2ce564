"""Replacement policies side by side on generated and recorded requests, each beside what no policy can pass.

    python -m benchmarks.policies --data DIR [--quick] [--limit N] [--profile FILE] [--plot FILE.png] [--json FILE]
    python -m benchmarks.policies --trace FILE [...]
    python -m benchmarks.policies --storage [--json FILE]

Workloads: graph entities under three access patterns (DepCache, section 6.1), repeated questions over documents at
top-k of 1 to 5, and 3 kept of 5 (RAGCache, sections 7 and 8), Mooncake's traces, or a trace of the server. Capacities:
10, 20 and 40% of the data's distinct tokens (documents: 5% too), or token counts for Mooncake. Each is served by the
device alone, and by a device of a fifth with host memory of the other four. `bound` is the highest token hit rate that
single tokens allow, `min` that of Belady's MIN; `belady` is a policy that knows all that will be asked, in the tree.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import bound, report, storage, workload
from benchmarks.gpu import code_digest
from benchmarks.simulator import LOOKAHEAD, Simulator, key_of
from benchmarks.workload import Corpus, Workload
from ragjax.cache.policy import POLICIES
from ragjax.cache.policy.base import Policy
from ragjax.cache.policy.belady import Belady
from ragjax.cache.profile import Profile
from ragjax.core import ConfigError

NAMES = (*POLICIES, "belady")

SHARES = (0.1, 0.2, 0.4)
DOCUMENT_SHARES = (0.05, *SHARES)
"""Capacities, as shares of the distinct tokens."""

MOONCAKE_CAPACITIES = (500_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000)

TOP_K = (1, 2, 3, 5)
KEEP = 3
"""Of the top 5 (RAGCache, section 8)."""

HOST_SHARE = 0.8
"""Of the capacity that lies in host memory, where there are two tiers."""

KV_BYTES = 2 * 30 * 3 * 64 * 2
"""Of a token: SmolLM2-135M in bfloat16 (keys and values, 30 layers, 3 KV heads, 64 wide)."""

COLUMNS = (
    "workload", "top_k", "keep", "capacity_tokens", "host_tokens", "policy", "token_hit_rate", "bound", "min",
    "document_hit_rate", "document_bound", "recomputed_tokens", "prefill_s", "moved_bytes", "decision_us",
)  # fmt: skip
STORAGE_COLUMNS = ("source", *storage.PAPER, "baseline_hit_rate", "stored", "baseline_stored", "computed")


def modelled() -> Profile:
    """T(cached, new) of LLaMA2-7B on an A10G, RAGCache's testbed, from the model's operations.

    A step reads all weights (14 GiB at 600 GB/s); 2 operations a weight and token; 4 a layer and unit of width for each
    token and token before it; 60 TFLOP/s, so that 4,000 tokens take the second that the paper measures (its Figure 2).
    """
    read, rate, linear, pair = 14 * 2**30 / 600e9, 60e12, 2 * 6.74e9, 4 * 32 * 4096
    cached = (0, *(2**i for i in range(7, 18)))
    new = tuple(2**i for i in range(18))

    def seconds(behind: int, n: int) -> float:
        return read + (linear * n + pair * n * (behind + n / 2)) / rate

    table = tuple(tuple(seconds(behind, n) for n in new) for behind in cached)
    return Profile(cached, new, table, "LLaMA2-7B on an A10G, from its operations")


# --------------------------------------------------------------------------------------- workloads


@dataclass(frozen=True)
class Effort:
    """How much of everything; `questions` bounds the questions of each text set, `limit` whatever else is asked."""

    shares: Sequence[float] = SHARES
    document_shares: Sequence[float] = DOCUMENT_SHARES
    mooncake: Sequence[int] = MOONCAKE_CAPACITIES
    top_k: Sequence[int] = TOP_K
    queries: int = 500
    repeats: int = 5000
    questions: int | None = None
    limit: int | None = None


QUICK = Effort((0.2,), (0.2,), (2_000_000,), (2, 5), queries=200, repeats=2000, questions=50, limit=1000)


def effort(quick: bool, limit: int | None) -> Effort:
    """What the flags say."""
    chosen = QUICK if quick else Effort()
    if limit is None:
        return chosen
    return replace(
        chosen, queries=min(limit, chosen.queries), repeats=min(limit, chosen.repeats), questions=limit, limit=limit
    )


@dataclass(frozen=True)
class Cell:
    """One workload at one capacity, split over the tiers."""

    work: Workload
    capacity: int
    host: int

    @property
    def name(self) -> str:
        """Tells it from all others of a run."""
        work = self.work
        return f"{work.name} top_k={work.top_k} keep={work.keep} capacity={self.capacity} host={self.host}"


def generated(data: Path, chosen: Effort) -> Iterator[tuple[Workload, Sequence[int]]]:
    """Workloads with their capacities, of whatever sets lie in `data`."""
    yield from _graphs(data, chosen)
    yield from _documents(data, chosen)
    for path in sorted(data.glob("traces/mooncake_*.jsonl")):
        yield workload.mooncake(path).limited(chosen.limit), chosen.mooncake


def _graphs(data: Path, chosen: Effort) -> Iterator[tuple[Workload, Sequence[int]]]:
    files = sorted(data.glob("kg/*/kg.tsv")) or sorted(data.glob("kg/*/questions.jsonl"))
    if not files:
        return
    graph = workload.graph_of(triple for path in files for triple in workload.read_triples(path))
    for pattern in workload.PATTERNS:
        work = workload.entities(graph, pattern, queries=chosen.queries)
        yield work, _parts(work, chosen.shares)


def _documents(data: Path, chosen: Effort) -> Iterator[tuple[Workload, Sequence[int]]]:
    corpora = workload.corpora(data, chosen.questions)
    if not corpora:
        return
    corpus = Corpus.union(corpora)
    retrieved = workload.bm25(corpus, max(chosen.top_k))
    for top_k in chosen.top_k:
        for keep in (None, KEEP) if top_k == 5 else (None,):
            work = workload.documents(corpus, retrieved, top_k, keep=keep, requests=chosen.repeats)
            yield work, _parts(work, chosen.document_shares)


def _parts(work: Workload, shares: Iterable[float]) -> list[int]:
    return [max(1, round(share * work.distinct)) for share in shares]


def cells(workloads: Iterable[tuple[Workload, Sequence[int]]]) -> Iterator[Cell]:
    """Every workload at every capacity, on one tier and on two."""
    for work, capacities in workloads:
        for capacity in capacities:
            yield Cell(work, capacity, 0)
            if (host := int(HOST_SHARE * capacity)) < capacity:
                yield Cell(work, capacity, host)


# ------------------------------------------------------------------------------------- measurement


def policy_of(name: str, work: Workload, profile: Profile) -> Policy:
    """A fresh policy."""
    if name == "belady":
        return Belady([[key_of(node) for node in request.nodes] for request in work.requests])
    return POLICIES[name](profile)


def serve(cell: Cell, name: str, profile: Profile) -> dict[str, Any]:
    """One row, without the bounds.

    recomputed_tokens include what is never kept. prefill_s: what the profile says all prefills take together.
    decision_us: median over requests of everything that is decided for one, in the simulator.
    """
    work = cell.work
    served = Simulator(work, policy_of(name, work, profile), cell.capacity - cell.host, cell.host).run()
    new = [total - one.hit for total, one in zip(work.totals, served, strict=True)]
    retrieved = sum(request.documents for request in work.requests)
    return {
        "workload": work.name,
        "policy": name,
        "capacity_tokens": cell.capacity,
        "host_tokens": cell.host,
        "top_k": work.top_k,
        "keep": work.keep,
        "requests": len(served),
        "token_hit_rate": bound.mean_rate([one.hit for one in served], work.totals),
        "document_hit_rate": sum(one.documents for one in served) / retrieved if retrieved else None,
        "recomputed_tokens": sum(new),
        "prefill_s": sum(profile.cost(one.hit, n) for one, n in zip(served, new, strict=True)),
        "moved_bytes": sum(one.moved for one in served) * KV_BYTES,
        "decision_us": float(np.median([one.seconds for one in served])) * 1e6,
    }


@dataclass(frozen=True)
class Bounds:
    """Of a workload at a capacity, however it is split over tiers."""

    work: Workload
    capacity: int

    @cached_property
    def row(self) -> dict[str, Any]:
        """bound, min and document_bound, as rows have them."""
        return {
            "bound": bound.best_token_hit_rate(self.work, self.capacity),
            "min": bound.mean_rate(bound.minimum(self.work, self.capacity), self.work.totals),
            "document_bound": bound.best_document_hit_rate(self.work, self.capacity),
        }


def measure(planned: Sequence[Cell], profile: Profile, samples: report.Samples) -> list[dict[str, Any]]:
    """All rows: every policy in every cell, those of an unfinished run first."""
    rows, progress = [], report.Progress(len(planned) * len(NAMES))
    limits: Bounds | None = None
    for cell in planned:
        if limits is None or (limits.work, limits.capacity) != (cell.work, cell.capacity):
            limits = Bounds(cell.work, cell.capacity)
        for name in NAMES:
            key = f"{cell.name} policy={name}"
            row = samples.get(key)
            if row is None:
                row = {**serve(cell, name, profile), **limits.row}
                samples.put(key, row)
                progress.step(key)
            else:
                progress.skip()
            rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------ report


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
        name = "entities" if row["workload"] in workload.PATTERNS else row["workload"]
        if row["top_k"] is not None:
            name += f" top-{row['top_k']}" + (f", {row['keep']} kept" if row["keep"] else "")
        groups.setdefault(name, []).append(row)
    return groups


def plot(rows: Sequence[report.Row], file: Path) -> None:
    """Hit rates by capacity, one picture for each workload, the bound dashed."""
    import matplotlib.figure

    groups: dict[tuple[Any, ...], list[report.Row]] = {}
    for row in rows:
        groups.setdefault((row["workload"], row["top_k"], row["keep"], bool(row["host_tokens"])), []).append(row)
    picture = matplotlib.figure.Figure(figsize=(5 * min(len(groups), 4), 4 * -(-len(groups) // 4)), layout="tight")
    for place, (key, members) in enumerate(groups.items(), 1):
        axes = picture.add_subplot(-(-len(groups) // 4), min(len(groups), 4), place)
        for name in dict.fromkeys(r["policy"] for r in members):
            line = [(r["capacity_tokens"], r["token_hit_rate"]) for r in members if r["policy"] == name]
            axes.plot(*zip(*line, strict=True), marker="o", markersize=3, label=name)
        limits = sorted({(r["capacity_tokens"], r["bound"]) for r in members})
        axes.plot(*zip(*limits, strict=True), "k--x", markersize=4, label="bound")
        name, top_k, keep, two_tiers = key
        axes.set_title(
            f"{name}{f' top-{top_k}' if top_k else ''}{f', {keep} kept' if keep else ''}"
            f"{', device and host' if two_tiers else ''}",
            fontsize=9,
        )
        axes.set_xlabel("capacity, tokens")
        axes.set_ylabel("token hit rate")
        axes.legend(fontsize=6)
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(file, dpi=120)
    print(f"wrote {file}", file=sys.stderr)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    flags = report.parser("policies", (__doc__ or "").partition("\n")[0])
    what = flags.add_mutually_exclusive_group(required=True)
    what.add_argument("--data", type=Path, metavar="DIR", help="a folder with kg/, text/ and traces/, or some of them")
    what.add_argument("--trace", type=Path, metavar="FILE", help="replay a trace that the server recorded")
    what.add_argument("--storage", action="store_true", help="FusionRAG's storage simulation (section 5.3.3) instead")
    flags.add_argument("--limit", type=int, metavar="N", help="at most N questions a text set, N requests a workload")
    flags.add_argument("--profile", type=Path, metavar="FILE", help="a measured cost profile; modelled without")
    flags.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw hit rates by capacity")
    chosen = flags.parse_args(arguments)
    if chosen.limit is not None and chosen.limit < 1:
        flags.error(f"--limit must be at least 1, not {chosen.limit}")
    if chosen.data is not None and not chosen.data.is_dir():
        flags.error(f"no such folder: {chosen.data}")
    if chosen.trace is not None and not chosen.trace.is_file():
        flags.error(f"no such file: {chosen.trace}")
    return chosen


def workloads(chosen: argparse.Namespace) -> list[tuple[Workload, Sequence[int]]]:
    """What the command line asks for.

    Raises:
        ConfigError: if there is nothing to serve.
    """
    much = effort(chosen.quick, chosen.limit)
    if chosen.trace is not None:
        work = workload.recorded(chosen.trace).limited(chosen.limit)
        found: list[tuple[Workload, Sequence[int]]] = [(work, _parts(work, much.shares))]
    else:
        found = list(generated(chosen.data, much))
    found = [(work, sizes) for work, sizes in found if work.requests]
    if not found:
        raise ConfigError(f"{chosen.trace or chosen.data} holds no requests, graphs, corpora or traces")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    chosen = options(arguments)
    try:
        return _run(chosen)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(chosen: argparse.Namespace) -> int:
    if chosen.storage:
        rows = storage.rows(storage.Setting())
        report.finish(report.header("policies"), rows, STORAGE_COLUMNS, chosen.json)
        return 0
    profile = modelled() if chosen.profile is None else Profile.load(chosen.profile)
    planned = list(cells(workloads(chosen)))
    head = report.header("policies")
    print(f"costs: {profile.measured_on or chosen.profile}; lookahead {LOOKAHEAD}")
    settings = {
        "data": str(chosen.data or chosen.trace),
        "limit": chosen.limit,
        "quick": chosen.quick,
        "profile": asdict(profile),
        "code": code_digest(),
    }
    samples = report.Samples("policies", settings)
    rows = measure(planned, profile, samples)
    print(
        "\n" + report.table(means(rows), ("workload", "policy", "figure", "mean", "of_min", "lacr_gain", "pgdsf_gain"))
    )
    report.finish(head, rows, COLUMNS, chosen.json)
    if chosen.plot is not None:
        plot(rows, chosen.plot)
    samples.done()
    return 0


if __name__ == "__main__":
    sys.exit(main())
