"""The engine's figures, as `Engine.stats` and `/metrics` show them."""

from __future__ import annotations

from ragjax.cache.cache import KnowledgeCache
from ragjax.core import Preprocessed
from ragjax.engine.build import Parts
from ragjax.engine.loop import Loop
from ragjax.store.disk import DiskStore
from ragjax.store.shared import SharedTier

Stats = dict[str, float | dict[str, float]]


def stats_of(loop: Loop, parts: Parts) -> Stats:
    return {
        **_requests(loop),
        **_cache(parts.cache),
        "attention_calls_total": dict(parts.runner.calls),
        "attention_fallbacks_total": dict(parts.runner.fallbacks),
        **parts.contract.stats(),
        **({} if parts.disk is None else _disk(parts.disk)),
        **({} if parts.shared is None else _shared(parts.shared, loop)),
    }


def passages_of(progress: Preprocessed) -> Stats:
    waiting = progress.passages - progress.prepared - progress.beyond
    return {"passages": {"prepared": progress.prepared, "waiting": waiting, "beyond": progress.beyond}}


def _requests(loop: Loop) -> Stats:
    counters = loop.requests.counters
    return {
        "requests_total": dict(counters.requests),
        "prompt_tokens_total": counters.prompt_tokens,
        "reused_tokens_total": counters.reused_tokens,
        "recomputed_tokens_total": counters.recomputed_tokens,
        "generated_tokens_total": counters.generated_tokens,
        "cancelled_total": counters.cancelled,
        "errors_total": counters.errors,
        "steps_total": counters.steps,
        "step_failures_total": counters.step_failures,
        "request_timeouts_total": dict(counters.timeouts),
        "pauses_total": counters.pauses,
        "resumes_total": counters.resumes,
        "paused": len(loop.requests.paused),
        "load_fallbacks_total": dict(counters.load_fallbacks),
        "awaits_total": counters.awaits,
        "awaited_tokens_total": counters.awaited_tokens,
        "device_losses_total": counters.device_losses,
        "speculations_total": dict(counters.speculations),
        "dropped_tokens_total": counters.dropped_tokens,
        "lookup_tokens_total": {
            "proposed": counters.lookup_tokens["proposed"],
            "accepted": counters.lookup_tokens["accepted"],
        },
        "speculative_wasted_tokens_total": counters.speculative_wasted_tokens,
        "overhead_ms_last": counters.overhead_ms_last,
        "queue_depth": loop.waiting,
        "running": loop.running,
    }


def _cache(cache: KnowledgeCache) -> Stats:
    metrics = cache.metrics
    return {
        "lookups_total": metrics.lookups,
        "exact_hit_tokens_total": metrics.exact_hit_tokens,
        "approximate_hit_tokens_total": metrics.approximate_hit_tokens,
        "missed_tokens_total": metrics.missed_tokens,
        "admitted_tokens_total": metrics.admitted_tokens,
        "evicted_tokens_total": metrics.evicted_tokens,
        "unwritten_tokens_total": metrics.unwritten_tokens,
        "tier_hit_tokens_total": dict(metrics.tier_hit_tokens),
        "transfers_total": dict(metrics.jobs),
        "transfer_bytes_total": dict(metrics.job_bytes),
        "transfer_seconds_total": dict(metrics.job_seconds),
        "transfer_failures_total": dict(metrics.failures),
        "rest_error_max": metrics.loss_max,
        "host_bytes": metrics.host_bytes,
        "nodes": metrics.nodes,
        "pages_used": metrics.pages_used,
        "pages_total": cache.pool.capacity,
    }


def _disk(disk: DiskStore) -> Stats:
    stats = disk.stats()
    return {
        "disk_entries": stats.entries,
        "disk_bytes": stats.bytes,
        "disk_set_aside_total": stats.set_aside,
        "disk_evicted_total": stats.evicted,
    }


def _shared(shared: SharedTier, loop: Loop) -> Stats:
    standing = shared.standing()
    counts = standing.counts
    return {
        "remote_up": float(standing.on),
        "remote_changes_total": counts.get("changes", 0),
        "remote_entries": standing.entries,
        "remote_bytes": standing.bytes,
        "remote_questions_total": counts.get("asked", 0),
        "remote_found_total": counts.get("found", 0),
        "remote_late_total": loop.requests.counters.late,
        "remote_reads_total": counts.get("reads", 0),
        "remote_read_bytes_total": counts.get("read_bytes", 0),
        "remote_missing_total": counts.get("missing", 0),
        "remote_damaged_total": counts.get("damaged", 0),
        "remote_writes_total": counts.get("writes", 0),
        "remote_written_bytes_total": counts.get("written_bytes", 0),
        "remote_kept_total": counts.get("kept", 0),
        "remote_evicted_total": counts.get("evicted", 0),
        "remote_dropped_total": dict(standing.dropped),
        "remote_errors_total": {"unanswered": counts.get("failures", 0), "refused": counts.get("refused", 0)},
    }
