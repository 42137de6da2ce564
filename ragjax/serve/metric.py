"""Metrics in Prometheus' text form: the engine's own numbers, and what only the server sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ragjax import core

if TYPE_CHECKING:
    from ragjax.cluster.fleet import Service

HELP = {
    "requests_total": "Requests answered, by strategy.",
    "prompt_tokens_total": "Prompt tokens of answered requests.",
    "reused_tokens_total": "Prompt tokens whose keys and values came from the cache.",
    "recomputed_tokens_total": "Prompt tokens computed for the request, whether missing or repaired.",
    "generated_tokens_total": "Tokens generated for answered requests.",
    "cancelled_total": "Requests cancelled before their answer was complete.",
    "errors_total": "Requests that failed inside the engine, without those that were refused (400).",
    "lookups_total": "Look-ups in the cache.",
    "exact_hit_tokens_total": "Tokens that cache look-ups found, computed on exactly their context.",
    "approximate_hit_tokens_total": "Tokens that cache look-ups found, computed on another context.",
    "missed_tokens_total": "Tokens that cache look-ups did not find.",
    "admitted_tokens_total": "Tokens put into the cache.",
    "evicted_tokens_total": "Tokens evicted from the device.",
    "unwritten_tokens_total": "Tokens that left memory unwritten, since more than 1 GiB waited to be written to disk.",
    "tier_hit_tokens_total": "Tokens that cache look-ups found, by the tier they came from.",
    "transfers_total": "Copies of KV between tiers: save to host memory, write to disk, load to the device.",
    "transfer_bytes_total": "Bytes that these copies moved, by kind.",
    "transfer_seconds_total": "Seconds from the order to the end of these copies, by kind; they overlap.",
    "transfer_failures_total": "Copies that failed, by kind.",
    "step_failures_total": "Steps that failed while the device's memory was intact; their requests started again.",
    "pauses_total": "Times that a decoding request gave its pages to an older one, its KV kept in host memory.",
    "resumes_total": "Times that a paused request went on.",
    "paused": "Requests paused now.",
    "load_fallbacks_total": "Requests that recomputed KV because its load failed or was slow.",
    "awaits_total": "Requests that waited for KV which another request was computing.",
    "awaited_tokens_total": "Tokens of that KV that they reused.",
    "device_losses_total": "Times the device's pool was lost and allocated again.",
    "dropped_tokens_total": "Prompt tokens that no token of the answer saw, since the prompt was compressed.",
    "lookup_tokens_total": "Tokens that prompt lookup proposed, and of these those that were accepted.",
    "speculations_total": "Answers that were to begin before their search ended: hit, begun with the final chunks; "
    "wrong, with others; skipped, no room to begin.",
    "speculative_wasted_tokens_total": "Tokens computed for chunks that turned out not to be the final ones.",
    "rest_error_max": "Largest relative RMS error of KV encoded at rest.",
    "host_bytes": "Bytes of KV in host memory.",
    "nodes": "Nodes of the knowledge tree.",
    "disk_entries": "Entries of the disk cache.",
    "disk_bytes": "Bytes of the disk cache.",
    "disk_set_aside_total": "Entries of the disk cache that were damaged or foreign, and set aside.",
    "disk_evicted_total": "Entries that left the disk cache.",
    "remote_up": "1 if the shared cache answers.",
    "remote_changes_total": "Times that the shared cache went off or came back.",
    "remote_entries": "Entries of the shared cache, of all who use it.",
    "remote_bytes": "Bytes of the shared cache, of all who use it.",
    "remote_questions_total": "Questions to the shared cache, for what continues a context and for entries.",
    "remote_found_total": "Entries that its answers named.",
    "remote_late_total": "Requests that started before the shared cache had answered all questions about them.",
    "remote_reads_total": "Entries read from the shared cache and found intact.",
    "remote_read_bytes_total": "Bytes of these entries.",
    "remote_missing_total": "Entries that had left the shared cache when they were read.",
    "remote_damaged_total": "Entries of the shared cache that were damaged, and removed.",
    "remote_writes_total": "Entries written to the shared cache.",
    "remote_written_bytes_total": "Bytes of these entries.",
    "remote_kept_total": "Entries that were to be written and were there already.",
    "remote_evicted_total": "Entries that left the shared cache for others.",
    "remote_dropped_total": "Entries not written to the shared cache: full, too many waited; off, it was off; large, "
    "over the limit; failed, it did not answer or refused.",
    "remote_errors_total": "Calls that the shared cache left unanswered, or refused.",
    "shadow_replays_total": "Requests replayed in full attention, dropped as too many waited, or failed.",
    "shadow_escalations_total": "Times that shadow replay changed what requests run by default: raise, to the next "
    "setting of the report; exact, to prefix; fault, to full.",
    "shadow_faults_total": "Replayed answers that were labelled exact and are not.",
    "steps_total": "Steps of the engine's loop.",
    "overhead_ms_last": "Milliseconds before the last first token that were neither retrieval nor compiled code.",
    "queue_depth": "Requests that wait for admission.",
    "running": "Requests admitted and not finished.",
    "passages": "Passages of the knowledge bases: prepared, waiting, or beyond what the cache has room for.",
    "pages_used": "Pages of the device pool in use.",
    "pages_total": "Pages of the device pool.",
    "routed_total": "Requests that were sent to the replica.",
    "routing_seconds_total": "Seconds that the choice of the replica took, of these requests together.",
    "programs_left": "Compiled programs that are still to be made while requests are served.",
    "attention_calls_total": "Attentions run, one a layer and step, by backend.",
    "attention_fallbacks_total": "Attentions that a better backend refused, by backend and reason.",
}
# `_total` is the suffix of counters; the size of the pool is a gauge.
_GAUGES = {"pages_total": "pages_capacity"}
_LABELS = {
    "remote_dropped_total": "reason",
    "remote_errors_total": "kind",
    "requests_total": "strategy",
    "tier_hit_tokens_total": "tier",
    "load_fallbacks_total": "reason",
    "shadow_replays_total": "outcome",
    "speculations_total": "outcome",
    "lookup_tokens_total": "outcome",
    "passages": "state",
    "shadow_escalations_total": "reason",
    "attention_calls_total": "backend",
    "attention_fallbacks_total": "reason",
}

_LONG = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_NATS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class ServerMetrics:
    """Metrics of one app, in a registry of its own. Histograms are in seconds, except those of shadow replay."""

    def __init__(self, engine: Service):
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(engine))
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self.requests = counter(
            "ragjax_http_requests",
            "HTTP requests; status 499: the client left before the response began.",
            ["route", "status"],
        )
        self.connections_ended = counter(
            "ragjax_http_connections_ended",
            "Connections that the server ended: overloaded, one too many; late, a request did not arrive in time; "
            "idle, no next request came; unread, the answer was not read; malformed, no HTTP.",
            ["reason"],
        )
        self.request_seconds = histogram(
            "ragjax_http_request_seconds", "Arrival to end of response.", ["route"], buckets=_LONG
        )
        self.ttft_seconds = histogram("ragjax_ttft_seconds", "Arrival to first text.", ["strategy"], buckets=_LONG)
        self.inter_token_seconds = histogram(
            "ragjax_inter_token_seconds", "Between two deltas of one answer.", buckets=_SHORT
        )
        nats = "KL from full attention of a replayed request, nats a token."
        self.shadow_kl = histogram("ragjax_shadow_kl", nats, ["strategy"], buckets=_NATS)
        shares = "Share of a replayed request's tokens that full attention likes best, too."
        self.shadow_top1 = histogram("ragjax_shadow_top1", shares, ["strategy"], buckets=_SHARES)

        def note(strategy: str, seen: core.Divergence) -> None:
            self.shadow_kl.labels(strategy).observe(seen.kl)
            self.shadow_top1.labels(strategy).observe(seen.top1)

        engine.observe_shadows(note)

    def count_ended(self, reason: str) -> None:
        self.connections_ended.labels(reason).inc()

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Service):
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        engine = self._engine
        found = engine.figures() if hasattr(engine, "figures") else {"": engine.stats()}
        for replica, stats in found.items():
            for name, value in stats.items():
                make = CounterMetricFamily if name.endswith("_total") and name not in _GAUGES else GaugeMetricFamily
                kinds = ["replica"] * bool(replica) + [_LABELS.get(name, "kind")] * isinstance(value, Mapping)
                made: Metric = make(f"ragjax_{_GAUGES.get(name, name)}", HELP.get(name, ""), labels=kinds)
                family = families.setdefault(name, made)
                for key, number in value.items() if isinstance(value, Mapping) else [(None, value)]:
                    labels = [*([replica] if replica else []), *([] if key is None else [key])]
                    family.add_metric(labels, float(number))  # type: ignore[attr-defined] # of counters and gauges
        read = CounterMetricFamily(
            "ragjax_files_damaged",
            "Reads of uploaded files, by clients or into stores, that found one damaged.",
            value=self._engine.library.damaged,
        )
        told = engine.indexing
        if told is not None:
            files = GaugeMetricFamily("ragjax_indexing_files", "Files of --knowledge, by state.", labels=["state"])
            files.add_metric(["indexed"], told.files)
            files.add_metric(["waiting"], told.files_total - told.files)
            families["indexing"] = files
            skipped = GaugeMetricFamily("ragjax_indexing_skipped", "Files and lines left out.", value=len(told.skipped))
            families["skipped"] = skipped
        return [*families.values(), read]
