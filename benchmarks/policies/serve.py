"""A policy's figures on a workload at a capacity, and what no policy can pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from benchmarks.baseline.policy.belady import Belady
from benchmarks.policies import bound
from benchmarks.policies.cell import Cell
from benchmarks.policies.simulator import Simulator, key_of
from benchmarks.policies.workload import Workload
from ragjax.cache.policy import POLICIES
from ragjax.cache.policy.base import Policy
from ragjax.cache.profile import Profile

NAMES = (*POLICIES, "belady")
"""Of the server and of `benchmarks.baseline`."""

KV_BYTES = 2 * 30 * 3 * 64 * 2
"""Of a token: SmolLM2-135M in bfloat16 (keys and values, 30 layers, 3 KV heads, 64 wide)."""


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


def policy_of(name: str, work: Workload, profile: Profile) -> Policy:
    """A fresh policy."""
    if name == "belady":
        return Belady([[key_of(node) for node in request.nodes] for request in work.requests])
    return POLICIES[name].for_device(profile)


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
