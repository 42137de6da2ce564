"""Every order with some policies: what reordering the queue adds to replacement (DepCache, Figure 13; RAGCache, 18)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.common import report
from benchmarks.common.samples import Samples
from benchmarks.policies import bound
from benchmarks.policies.cell import Cell, Effort, figures, policy_of
from benchmarks.policies.simulator import Simulator
from ragjax.cache.profile import Profile
from ragjax.schedule.order import ORDERS

POLICIES = ("lru", "lacr")
COLUMNS = (
    "workload", "top_k", "capacity_tokens", "policy", "order", "token_hit_rate", "found_share", "served_min",
    "recomputed_tokens", "prefill_s", "decision_us",
)  # fmt: skip


def effort(quick: bool) -> Effort:
    """Two capacities of each workload: one that holds what the queue wants, and one that does not."""
    if quick:
        return Effort((0.2,), (0.2,), (2_000_000,), (2,), queries=100, repeats=500, questions=50, limit=500)
    return Effort((0.02, 0.2), (0.05, 0.2), (500_000, 2_000_000), (2,), queries=250, limit=2500)


def serve(cell: Cell, policy: str, order: str, profile: Profile) -> dict[str, Any]:
    """One row, of the device alone.

    found_share: of all tokens, those that were found. served_min: token hit rate of Belady's MIN on the requests in the
    order in which they were served: what replacement leaves.
    """
    work = cell.work
    simulator = Simulator(work, policy_of(policy, work, profile), cell.capacity)
    served = simulator.run(order=ORDERS[order]())
    sequence = replace(work, requests=tuple(work.requests[at] for at in simulator.sequence))
    return {
        "workload": work.name, "top_k": work.top_k, "capacity_tokens": cell.capacity, "policy": policy, "order": order,
        **figures(work, served, profile), "found_share": sum(one.hit for one in served) / sum(work.totals),
        "served_min": bound.mean_rate(bound.minimum(sequence, cell.capacity), sequence.totals),
    }  # fmt: skip


def measure(planned: Sequence[Cell], profile: Profile, samples: Samples) -> Iterator[dict[str, Any]]:
    return samples.rows({
        f"{cell.name} policy={policy} order={order}": partial(serve, cell, policy, order, profile)
        for cell in planned if not cell.host for policy in POLICIES for order in ORDERS
    })  # fmt: skip


def gains(rows: Sequence[report.Row]) -> list[dict[str, Any]]:
    """Tokens found by each policy and order, over those of the same policy, and of `lacr`, in order of arrival."""
    cells: dict[tuple[Any, ...], list[report.Row]] = defaultdict(list)
    for row in rows:
        cells[row["workload"], row["capacity_tokens"]].append(row)
    found: list[dict[str, Any]] = []
    for (workload, capacity), members in cells.items():
        share = {(row["policy"], row["order"]): row["found_share"] for row in members}
        best = max(share[policy, order] for policy, order in share if policy != "lacr" and order != "fcfs")
        for (policy, order), value in share.items():
            row = {"workload": workload, "capacity_tokens": capacity, "policy": policy, "order": order}
            row["found_share"] = value
            row["over_same_policy"] = _gain(value, share[policy, "fcfs"])
            row["over_lacr"] = _gain(value, share["lacr", "fcfs"])
            row["over_best_order"] = _gain(value, best)
            found.append(row)
    return found


def _gain(value: float, base: float) -> float | None:
    return value / base - 1 if base else None
