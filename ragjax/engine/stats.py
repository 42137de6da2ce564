"""The engine's figures, as `Engine.stats` and `/metrics` show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ragjax.core import Preprocessed
from ragjax.engine.build import Parts
from ragjax.engine.loop import Loop

Stats = dict[str, float | dict[str, float]]

APART = ("stops", "late", "overhead_ms_last")
"""Counters of requests that are told elsewhere, or nowhere."""

FOUND_AND_KEPT = (
    *("lookups", "exact_hit_tokens", "approximate_hit_tokens", "missed_tokens", "tier_hit_tokens"),
    *("admitted_tokens", "evicted_tokens", "unwritten_tokens"),
)

ASKED_OF_SHARED = ("found", "reads", "read_bytes", "missing", "damaged", "writes", "written_bytes", "kept", "evicted")


def stats_of(loop: Loop, parts: Parts) -> Stats:
    counters, metrics = vars(loop.requests.counters), parts.cache.metrics
    figures: Stats = {
        **_totals("", counters, counters.keys() - set(APART)),
        "overhead_ms_last": counters["overhead_ms_last"],
        "paused": len(loop.requests.paused),
        "queue_depth": loop.waiting,
        "running": loop.running,
        **_totals("", vars(metrics), FOUND_AND_KEPT),
        "transfers_total": dict(metrics.jobs),
        "transfer_bytes_total": dict(metrics.job_bytes),
        "transfer_seconds_total": dict(metrics.job_seconds),
        "transfer_failures_total": dict(metrics.failures),
        "rest_error_max": metrics.loss_max,
        "host_bytes": metrics.host_bytes,
        "nodes": metrics.nodes,
        "pages_used": metrics.pages_used,
        "pages_total": parts.cache.pool.capacity,
        "attention_calls_total": dict(parts.runner.calls),
        "attention_fallbacks_total": dict(parts.runner.fallbacks),
        **parts.contract.stats(),
    }
    if parts.disk is not None:
        disk = parts.disk.stats()
        figures |= {"disk_entries": disk.entries, "disk_bytes": disk.bytes}
        figures |= {"disk_set_aside_total": disk.set_aside, "disk_evicted_total": disk.evicted}
    if parts.shared is not None:
        standing = parts.shared.standing()
        counts = standing.counts
        figures |= {
            "remote_up": float(standing.on),
            "remote_entries": standing.entries,
            "remote_bytes": standing.bytes,
            "remote_changes_total": counts.get("changes", 0),
            "remote_questions_total": counts.get("asked", 0),
            "remote_late_total": counters["late"],
            **_totals("remote_", counts, ASKED_OF_SHARED),
            "remote_dropped_total": dict(standing.dropped),
            "remote_errors_total": {"unanswered": counts.get("failures", 0), "refused": counts.get("refused", 0)},
        }
    return figures


def passages_of(progress: Preprocessed) -> Stats:
    waiting = progress.passages - progress.prepared - progress.beyond
    return {"passages": {"prepared": progress.prepared, "waiting": waiting, "beyond": progress.beyond}}


def _totals(before: str, counts: Mapping[str, int | dict[str, float]], names: Iterable[str]) -> Stats:
    found = {f"{before}{name}_total": counts.get(name, 0) for name in names}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}
