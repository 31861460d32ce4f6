"""OpenTelemetry traces: one span per request with a child for each stage, exported over OTLP/HTTP.

The frontend adds the stages when a request ends, from the timelines that the schedulers keep anyway; the engine loop
only passes the `traceparent` on. A decode server exports a span of the whole request. It sends its `traceparent` with
the prompt, so that the prefill server can export its part as a child of that span. Spans contain no prompts and no
outputs.

Needs the extra `otel`. Off unless `otlp_endpoint` is set, or OTEL_EXPORTER_OTLP_ENDPOINT in the environment.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ...common.errors import StartupError
from ...scheduler.messages.frontend import Failed, Finished, PromptSent
from .stages import AFTER_FIRST_TOKEN

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TRACES_PATH = "/v1/traces"
LAST_SPANS_S = 2.0
NOT_INSTALLED = 'traces need OpenTelemetry: pip install "pdserve[otel]"'
STAGE_ORDER = ("queue", "control", "prefill_queue", "prefill", "transfer", "admit", "decode", "retracted")
"""Stages in the order of time. If a request was retracted, `decode` and `retracted` alternate in fact; the spans show
each once.
"""
BEFORE_FIRST_TOKEN = tuple(stage for stage in STAGE_ORDER if stage not in AFTER_FIRST_TOKEN)


def start_tracing(endpoint: str | None, role: str, version: str, environ: Mapping[str, str]) -> "Tracing | None":
    """Returns the tracing of this process; None if it is off. Raises StartupError if OpenTelemetry is missing."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if endpoint is None and not any(environ.get(name) for name in ENDPOINT_VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise StartupError(NOT_INSTALLED) from None
    if endpoint is not None and not endpoint.rstrip("/").endswith(TRACES_PATH):
        endpoint = endpoint.rstrip("/") + TRACES_PATH
    return Tracing(OTLPSpanExporter(endpoint=endpoint), role, version)


class Tracing:
    """Makes spans and exports them from a thread of its own. Used on the event loop."""

    def __init__(self, exporter: "SpanExporter", role: str, version: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = Resource.create({"service.name": f"pdserve-{role}", "service.version": version})
        self._provider = TracerProvider(resource=named, shutdown_on_exit=False)  # samples as OTEL_TRACES_SAMPLER says
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pdserve", version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, rid: str, headers: Mapping[str, str]) -> "Span":
        """Starts the span of a request. It is a child of the span that the client's headers name, if they do."""
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract(headers)
        return self._tracer.start_span("generate", parent, SpanKind.SERVER, {"gen_ai.request.id": rid})

    def context_of(self, span: "Span") -> str | None:
        """The `traceparent` to send to prefill; None if the trace is not sampled."""
        if not span.is_recording():
            return None
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier.get("traceparent")

    def end(self, span: "Span", end: Finished | Failed, started_at_ns: int) -> None:
        """End the span of a request, with a child for each stage."""
        from opentelemetry.trace import StatusCode

        if not span.is_recording():
            return
        if isinstance(end, Failed):
            span.set_attributes({"error.type": end.code, "http.response.status_code": end.status})
            span.set_status(StatusCode.ERROR, end.code)
        else:
            first_token_s = sum(end.timeline.get(stage, 0.0) for stage in BEFORE_FIRST_TOKEN)
            span.set_attributes(
                {
                    "gen_ai.response.finish_reasons": (end.reason.type,),
                    "gen_ai.usage.input_tokens": end.prompt_tokens,
                    "gen_ai.usage.output_tokens": end.completion_tokens,
                    "gen_ai.latency.time_to_first_token": first_token_s,
                    "pdserve.cached_tokens": end.cached_tokens,
                    "pdserve.kv_path": end.kv_path,
                }
            )
            stages = ((stage, end.timeline.get(stage, 0.0)) for stage in STAGE_ORDER)
            self._add_stages(span, stages, started_at_ns)
        span.end()

    def prompt_sent(self, sent: PromptSent) -> None:
        """Exports the span of a prompt that this prefill server has now computed and sent completely."""
        from opentelemetry.trace import SpanKind

        stages = (("prefill_queue", sent.queue_s), ("prefill", sent.compute_s), ("transfer", sent.transfer_s))
        started_at_ns = time.time_ns() - round(1e9 * sum(seconds for _, seconds in stages))
        parent = self._propagator.extract({"traceparent": sent.traceparent})
        attributes: dict[str, str | int] = {
            "gen_ai.request.id": sent.rid,
            "gen_ai.usage.input_tokens": sent.prompt_tokens,
            "pdserve.cached_tokens": sent.cached_tokens,
            "pdserve.chunks": sent.chunks,
            "pdserve.bytes": sent.bytes_written,
        }
        span = self._tracer.start_span("prefill", parent, SpanKind.SERVER, attributes, start_time=started_at_ns)
        self._add_stages(span, stages, started_at_ns)
        span.end()

    def close(self) -> None:
        """Export the remaining spans, but for LAST_SPANS_S at most: the collector may be unreachable."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(LAST_SPANS_S)

    def _add_stages(self, span: "Span", stages: Iterable[tuple[str, float]], started_at_ns: int) -> None:
        """Adds a child span for each stage, one after the other in time."""
        from opentelemetry.trace import set_span_in_context

        context, at_ns = set_span_in_context(span), started_at_ns
        for stage, seconds in stages:
            if seconds <= 0.0:
                continue
            child = self._tracer.start_span(stage, context, start_time=at_ns)
            at_ns += round(1e9 * seconds)
            child.end(end_time=at_ns)
