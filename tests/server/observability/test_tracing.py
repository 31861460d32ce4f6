"""Traces: spans of a request follow its timeline, on both servers, and the client's trace context is kept."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from pdserve.common.errors import StartupError
from pdserve.scheduler.messages.frontend import Failed, Finished, FinishReason, PromptSent
from pdserve.server.observability.tracing import NOT_INSTALLED, STAGE_ORDER, Tracing, start_tracing
from tests.cluster.servers import python_path
from tests.server.observability.otlp_collector import collecting

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
TIMELINE = {
    "queue": 0.5,
    "prefill_queue": 0.25,
    "prefill": 1.0,
    "transfer": 0.125,
    "control": 0.0,
    "admit": 0.5,
    "retracted": 0.0,
    "decode": 4.0,
}


class MemoryExporter(SpanExporter):
    """Keeps spans in memory."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


@pytest.fixture
def kept() -> Iterator[tuple[Tracing, MemoryExporter]]:
    exporter = MemoryExporter()
    tracing = Tracing(exporter, "decode", "1.2.3")
    yield tracing, exporter
    tracing.close()


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_stages_are_children_of_the_request(kept: tuple[Tracing, MemoryExporter]) -> None:
    tracing, exporter = kept
    began = time.time_ns()
    span = tracing.begin("r1", HEADERS)
    tracing.end(span, Finished("r1", FinishReason("stop"), 100, 20, 7, TIMELINE, "device"), began)
    tracing.close()
    *children, root = exporter.spans
    assert root.parent is not None
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
    assert {child.parent.span_id for child in children if child.parent} == {root.context.span_id}
    names = [stage for stage in STAGE_ORDER if TIMELINE[stage]]
    assert [child.name for child in children] == names, "stages of no time have no span"
    assert [seconds(child) for child in children] == [pytest.approx(TIMELINE[name]) for name in names]
    ends = [child.end_time for child in children]
    assert [child.start_time for child in children] == [began, *ends[:-1]], "one after the other"
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.output_tokens"] == 20
    assert root.attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(1.875)
    assert root.resource.attributes["service.name"] == "pdserve-decode"


def test_failed_request_has_the_error_and_no_text(kept: tuple[Tracing, MemoryExporter]) -> None:
    tracing, exporter = kept
    span = tracing.begin("r1", {})
    tracing.end(span, Failed("r1", 503, "unavailable", "a message that may quote the prompt"), time.time_ns())
    tracing.close()
    (root,) = exporter.spans
    assert root.parent is None
    assert (root.status.is_ok, root.status.description) == (False, "unavailable")
    assert "prompt" not in root.to_json()


def test_prefill_continues_the_trace_of_decode(kept: tuple[Tracing, MemoryExporter]) -> None:
    tracing, exporter = kept
    span = tracing.begin("r1", {})
    traceparent = tracing.context_of(span)
    assert traceparent is not None
    sent = PromptSent("r1", traceparent, 100, 0, 4, 4096, queue_s=0.5, compute_s=1.5, transfer_s=0.25)
    tracing.prompt_sent(sent)
    tracing.close()
    *stages, prefill = exporter.spans
    assert (prefill.name, [stage.name for stage in stages]) == ("prefill", ["prefill_queue", "prefill", "transfer"])
    assert prefill.parent is not None
    assert prefill.parent.span_id == span.get_span_context().span_id
    assert prefill.attributes is not None
    assert prefill.attributes["pdserve.bytes"] == 4096
    assert [seconds(stage) for stage in stages] == [pytest.approx(value) for value in (0.5, 1.5, 0.25)]


def test_trace_that_is_not_sampled_is_not_propagated(kept: tuple[Tracing, MemoryExporter]) -> None:
    tracing, exporter = kept
    span = tracing.begin("r1", {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert tracing.context_of(span) is None
    tracing.end(span, Finished("r1", FinishReason("stop"), 1, 1, 0, TIMELINE), time.time_ns())
    tracing.close()
    assert exporter.spans == []


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-0-0-01", f"ff-{TRACE}-{PARENT}-01"])
def test_invalid_trace_context_begins_a_new_trace(kept: tuple[Tracing, MemoryExporter], traceparent: str) -> None:
    span = kept[0].begin("r1", {"traceparent": traceparent})
    assert f"{span.get_span_context().trace_id:032x}" not in ("0" * 32, TRACE)


def test_tracing_is_off_without_an_endpoint() -> None:
    assert start_tracing(None, "decode", "1", {}) is None
    assert start_tracing("http://127.0.0.1:4318", "decode", "1", {"OTEL_SDK_DISABLED": "true"}) is None
    program = "import sys, pdserve.server.launch.frontend; print(*[m for m in sys.modules if 'opentelemetry.sdk' in m])"
    command = [sys.executable, "-c", program]
    environ = {"PYTHONPATH": python_path()}
    assert subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout == "\n"


def test_missing_package_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(StartupError, match="otel") as refused:
        start_tracing("http://127.0.0.1:4318", "decode", "1", {})
    assert str(refused.value) == NOT_INSTALLED


def test_spans_reach_a_collector() -> None:
    with collecting() as collector:
        tracing = start_tracing(collector.url, "decode", "1", {})
        assert tracing is not None
        tracing.end(tracing.begin("r1", HEADERS), Finished("r1", FinishReason("stop"), 1, 1, 0, {}), time.time_ns())
        tracing.close()
    (span,) = collector.spans
    assert (span.service, span.name, span.trace_id, span.parent_id) == ("pdserve-decode", "generate", TRACE, PARENT)
