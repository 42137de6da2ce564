"""Spans of a request's parts, by OpenTelemetry; off unless its environment variables name an endpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ragjax.core import Answer, ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Spans:
    """Sends a span of each answer, with one for each part of it; they go to the trace that the client names.

    exporter: takes the spans (None: what the environment names).

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(f"{ENDPOINTS[0]} is set, which needs: pip install '.[tracing]'") from error
        name = os.environ.get("OTEL_SERVICE_NAME", "ragjax")
        self.provider = TracerProvider(resource=Resource.create({"service.name": name}))
        self.provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))

    @staticmethod
    def wanted() -> Spans | None:
        return Spans() if any(map(os.environ.get, ENDPOINTS)) else None

    def record(self, answer: Answer, headers: Mapping[str, str]) -> None:
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        times = answer.timings
        end, tracer = time.time_ns(), self.provider.get_tracer("ragjax")
        begin = end - int(times.total * 1e6)
        told: dict[str, str | int | tuple[str, ...]] = {
            "gen_ai.usage.input_tokens": answer.prompt_tokens,
            "gen_ai.usage.output_tokens": len(answer.tokens),
            "gen_ai.response.finish_reasons": (answer.finish_reason,),
            "ragjax.cached_tokens": answer.cached_tokens,
            "ragjax.strategy": answer.strategy,
        }
        context = TraceContextTextMapPropagator().extract(dict(headers))
        whole = tracer.start_span("ragjax.request", context, attributes=told, start_time=begin)
        parts = {"retrieve": times.retrieve, "load": times.load, "compile": times.compile, "prefill": times.prefill}
        queue = max(0.0, times.ttft - sum(parts.values()))
        ordered = {"retrieve": parts.pop("retrieve"), "queue": queue, **parts, "decode": times.total - times.ttft}
        for name, took in ordered.items():
            span = tracer.start_span(f"ragjax.{name}", set_span_in_context(whole), start_time=begin)
            begin += int(took * 1e6)
            span.end(begin)
        whole.end(end)

    def close(self) -> None:
        self.provider.shutdown()
