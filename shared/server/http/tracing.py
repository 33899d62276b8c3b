"""OpenTelemetry traces of requests: a span for each, with the moments of its life. Optional."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

NEEDED = "--otlp-traces-endpoint needs OpenTelemetry: pip install 'diptych[otel]'"


class RequestFacts(NamedTuple):
    """What a trace says about a request. Seconds are counted from its arrival."""

    rid: str
    seconds: float
    first_token_seconds: float | None
    queue_seconds: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    is_aborted: bool


class NoTracer:
    """A server without traces."""

    def request(self, facts: RequestFacts) -> None:
        """A request has ended now."""


class Tracer(NoTracer):
    """Spans named `llm_request`, whose attributes have the names of the semantic conventions for GenAI."""

    def __init__(self, provider: Any) -> None:
        """provider: a `TracerProvider`."""
        self.tracer = provider.get_tracer("diptych")

    def request(self, facts: RequestFacts) -> None:
        end = time.time_ns()
        start = end - int(facts.seconds * 1e9)
        span = self.tracer.start_span("llm_request", start_time=start)
        attributes = {
            "gen_ai.request.id": facts.rid,
            "gen_ai.usage.prompt_tokens": facts.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": facts.num_output_tokens,
            "gen_ai.usage.cached_tokens": facts.num_cached_tokens,
            "gen_ai.latency.e2e": facts.seconds,
            "gen_ai.latency.time_to_first_token": facts.first_token_seconds,
            "gen_ai.latency.time_in_queue": facts.queue_seconds,
            "diptych.aborted": facts.is_aborted,
        }
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if facts.first_token_seconds is not None:
            span.add_event("first token", timestamp=start + int(facts.first_token_seconds * 1e9))
        span.end(end_time=end)


def tracer_to(endpoint: str | None) -> NoTracer:
    """A tracer that sends to an OTLP endpoint over HTTP. Raises `ValueError` without OpenTelemetry's SDK."""
    if endpoint is None:
        return NoTracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ValueError(NEEDED) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "diptych"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracer(provider)
