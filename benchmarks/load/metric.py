"""Rows of a load: latencies, rates, what was found, how evenly requests were served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.load.record import Load, Record

COLUMNS = (
    "system", "workload", "strategy", "policy", "order", "speculate", "rate", "concurrency", "requests",
    "ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "requests_per_s", "tokens_per_s",
    "found_share", "errors",
)  # fmt: skip
"""Fields of a row, all of them."""

SERVED = ("strategy", "policy", "order", "speculate")
"""Fields that say how a system serves."""


def row_of(system: str, workload: str, served: Mapping[str, Any], load: Load) -> dict[str, Any]:
    """One row. served: `SERVED`, as far as the system has them.

    A request that failed counts in `requests` and `errors` and in nothing else.
    """
    answered = load.answered
    first = [record.ttft_ms for record in answered]
    gaps = [gap for record in answered for gap in record.gaps_ms]
    seconds = load.seconds
    return {
        "system": system,
        "workload": workload,
        **{name: served.get(name) for name in SERVED},
        "rate": load.rate,
        "concurrency": load.concurrency,
        "requests": len(load.records),
        "ttft_mean_ms": _mean(first),
        "ttft_p50_ms": percentile(first, 50),
        "ttft_p99_ms": percentile(first, 99),
        "itl_p50_ms": percentile(gaps, 50),
        "itl_p99_ms": percentile(gaps, 99),
        "requests_per_s": len(answered) / seconds,
        "tokens_per_s": sum(record.output_tokens for record in answered) / seconds,
        "found_share": found_share(answered),
        "errors": len(load.records) - len(answered),
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` percent lie, between two neighbours by the line through them."""
    return float(np.percentile(values, share)) if values else None


def found_share(records: Sequence[Record]) -> float | None:
    """Share of all prompt tokens whose KV was found; None where a system does not say."""
    said = [r for r in records if r.found_tokens is not None and r.prompt_tokens]
    if not said:
        return None
    return sum(r.found_tokens or 0 for r in said) / sum(r.prompt_tokens or 0 for r in said)


def details(load: Load) -> dict[str, Any]:
    """How evenly requests were served, and how much work they were.

    jain: Jain's index of seconds a token of the answer took, 1 if all were served alike, 1/n if one got everything.
    longest_wait_ms: the longest time to a first token. late_ms: how late the client itself was, at most.
    prompt_tokens, output_tokens: means, which tell whether systems did the same work.
    """
    answered = load.answered
    slow = np.array([r.total_s / max(1, r.output_tokens) for r in answered])
    return {
        "jain": float(slow.sum() ** 2 / (len(slow) * (slow**2).sum())) if len(slow) else None,
        "longest_wait_ms": max((r.ttft_ms for r in answered), default=None),
        "late_ms": max((1e3 * (r.sent - r.due) for r in load.records), default=None),
        "prompt_tokens": _mean([r.prompt_tokens for r in answered if r.prompt_tokens is not None]),
        "output_tokens": _mean([r.output_tokens for r in answered]),
    }
