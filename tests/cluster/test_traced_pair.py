"""A pair with traces and JSON logs: one trace has spans of both servers, and log lines have request ids."""

import json
from pathlib import Path

from tests.cluster.servers import HTTP, cluster, wait_until
from tests.server.observability.otlp_collector import collecting

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NEW_TOKENS = 5


def test_trace_of_a_request_has_spans_of_both_servers(llama: Path, tmp_path: Path) -> None:
    with collecting() as collector, cluster(tmp_path) as servers:
        flags = ("--otlp-endpoint", collector.url, "--log-format", "json", "--log-requests")
        environ = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
        prefill = servers.add("prefill", llama, *flags, env=environ)
        decode = servers.add(
            "decode", llama, "--prefill", prefill.endpoint, "--local-prefill", "never", *flags, env=environ
        )
        decode.wait_ready(peers=1)
        assert HTTP.get(f"{decode.url}/health_generate", timeout=60).status_code == 200, "a probe, which has no trace"
        response = HTTP.post(
            f"{decode.url}/generate",
            json={
                "input_ids": [7, 8, 9] * 20,
                "rid": "traced-1",
                "sampling_params": {"max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            },
            headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "from-client"},
            timeout=60,
        )
        assert response.status_code == 200, response.text
        wanted = {("pdserve-decode", "generate"), ("pdserve-prefill", "prefill"), ("pdserve-prefill", "transfer")}
        wait_until(
            lambda: wanted <= {(span.service, span.name) for span in list(collector.spans)}, 60, "spans of both servers"
        )
        logged = [json.loads(line) for line in decode.log.read_text().splitlines()]
    found = collector.spans
    roots = {span.service: span for span in found if span.attributes}
    request, prompt = roots["pdserve-decode"], roots["pdserve-prefill"]
    assert {span.trace_id for span in found} == {TRACE}
    assert (request.parent_id, prompt.parent_id) == (PARENT, request.span_id)
    assert request.attributes["gen_ai.usage.output_tokens"] == NEW_TOKENS
    assert prompt.attributes["gen_ai.usage.input_tokens"] == 60
    assert {"prefill", "decode"} <= {span.name for span in found if span.parent_id == request.span_id}
    assert {"prefill", "transfer"} <= {span.name for span in found if span.parent_id == prompt.span_id}
    (line,) = [line for line in logged if line.get("rid") == "traced-1"]
    assert (line["request_id"], line["level"], line["role"]) == ("from-client", "info", "decode")
