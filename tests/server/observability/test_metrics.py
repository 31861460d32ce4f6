"""Metrics: names, types and HELP follow Prometheus' rules, and every value of the leader is in the catalogue."""

import re
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Literal

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from pdserve.scheduler.messages.counters import DECODE_COUNTERS, PREFILL_COUNTERS, STORE_COUNTERS
from pdserve.scheduler.messages.frontend import Failed, Finished, FinishReason, Status
from pdserve.server.observability.catalog import COUNTERS, GAUGES
from pdserve.server.observability.metrics import Metrics, content_type_of
from pdserve.server.observability.stages import STAGES
from tests.scheduler.simulation.timed_simulator import TimedSimulator
from tests.server.exported_metrics import exported

BASE_UNITS = ("seconds", "bytes", "ratio", "info")
UNIT_INSIDE = ("process_cpu_seconds", "pdserve_kv_store_bytes_loaded", "pdserve_kv_store_bytes_written")
"""Names of prometheus_client, and names that earlier releases have introduced."""
OTHER_UNITS = ("ms", "milliseconds", "us", "microseconds", "kb", "mb", "gb", "gib", "percent", "perc", "minutes")
TIMELINE = {
    "queue": 1.0,
    "prefill_queue": 2.0,
    "prefill": 3.0,
    "transfer": 4.0,
    "control": 5.0,
    "admit": 6.0,
    "retracted": 7.0,
    "decode": 8.0,
}

Samples = Mapping[tuple[str, ...], float]


def samples_of(metrics: Metrics) -> Samples:
    text = metrics.render("").decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def reporting(role: str, gauges: Mapping[str, float], counters: Mapping[str, float], **states: int) -> Metrics:
    status = Status(dict(gauges), dict(counters), (), states, 0.0, 0.0)
    metrics = Metrics()
    metrics.watch_leader(lambda: SimpleNamespace(ready=None, status=status, loop_age_s=0.0))
    metrics.set_role(role)
    return metrics


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_names_types_and_help_follow_the_rules(role: Literal["decode", "prefill"]) -> None:
    for family in exported(role):
        assert len(family.documentation) > 10, family.name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", family.name), family.name
        words = family.name.split("_")
        assert not set(words) & set(OTHER_UNITS), f"{family.name} is not in base units"
        assert not words[-1].isdigit(), f"{family.name} has a number that belongs in a label"
        assert "total" not in words, f"{family.name} is a {family.type}: _total is for counters"
        unit = next((word for word in words if word in BASE_UNITS), None)
        rate = family.name.endswith("_tokens_per_second")
        assert unit in (None, words[-1]) or rate or family.name in UNIT_INSIDE, f"{unit} is not at the end"
        assert family.type in ("counter", "gauge", "histogram"), f"{family.name} is {family.type}"
        labels = {frozenset(sample.labels.keys() - {"le"}) for sample in family.samples}
        assert len(labels) == 1, f"series of {family.name} have different labels: {labels}"


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_no_metric_is_exported_twice(role: Literal["decode", "prefill"]) -> None:
    names = [family.name for family in exported(role)]
    assert sorted(set(names)) == sorted(names)
    series = [(sample.name, *sample.labels.items()) for family in exported(role) for sample in family.samples]
    assert len(set(series)) == len(series)


def test_both_formats_parse() -> None:
    metrics = reporting("decode", {"kv_pages": 4.0, "rank_0_busy_seconds": 1.0}, {"chunks": 2.0}, running=1)
    assert list(text_string_to_metric_families(metrics.render("").decode()))
    parse: Callable[[str], Iterable[Metric]] = parse_openmetrics  # untyped there
    accept = "application/openmetrics-text; version=1.0.0"
    body, content_type = metrics.render(accept), content_type_of(accept)
    assert content_type.startswith("application/openmetrics-text")
    assert {family.name: family.type for family in parse(body.decode())}["pdserve_chunks"] == "counter"


def test_every_value_of_the_schedulers_is_in_the_catalogue() -> None:
    """Add a HELP text to server/observability/catalog.py for a new counter or gauge."""
    assert {*DECODE_COUNTERS, *PREFILL_COUNTERS, *STORE_COUNTERS} - COUNTERS.keys() == set()
    simulator = TimedSimulator(tokens_per_s=1e6)
    (prefill,) = simulator.servers.values()
    assert {*simulator.decode.gauges(), *prefill.scheduler.gauges()} - GAUGES.keys() == set()


def test_rank_and_reason_are_labels() -> None:
    gauges = {"rank_0_busy_seconds": 1.5, "rank_11_busy_seconds": 2.5}
    counters = {"local_prefill_short": 3.0, "remote_prefill_on_time": 4.0, "kv_path_host_in_use": 5.0}
    found = samples_of(reporting("decode", gauges, counters))
    assert found["pdserve_rank_busy_seconds_total", "0"] == 1.5
    assert found["pdserve_rank_busy_seconds_total", "11"] == 2.5
    assert found["pdserve_prefill_placements_total", "local", "short"] == 3
    assert found["pdserve_prefill_placements_total", "remote", "on_time"] == 4
    assert found["pdserve_kv_path_choices_total", "host", "in_use"] == 5


@pytest.mark.parametrize(
    ("role", "states", "waiting", "running"),
    [
        ("decode", {"queued": 3, "saved": 1, "prefilling": 2, "running": 4, "saving": 1}, 4, 7),
        ("prefill", {"waiting": 5, "computing": 2, "sending": 1, "closing": 9}, 5, 3),
    ],
)
def test_gauges_for_routers(role: str, states: dict[str, int], waiting: int, running: int) -> None:
    found = samples_of(reporting(role, {"kv_pages": 8.0, "kv_pages_held": 2.0}, {}, **states))
    assert found["pdserve_num_requests_waiting",] == waiting
    assert found["pdserve_num_requests_running",] == running
    assert found["pdserve_kv_cache_usage_ratio",] == 0.25


def test_prefill_server_exports_the_tokens_of_its_leader() -> None:
    """Requests do not pass through its frontend, so the counters of the frontend would stay 0."""
    found = samples_of(reporting("prefill", {}, {"prompt_tokens": 700.0, "requests": 3.0}))
    assert found["pdserve_prompt_tokens_total",] == 700
    assert found["pdserve_requests_accepted_total",] == 3
    assert not [name for name, *_ in found if "first_token" in name or "generation" in name]
    decode = samples_of(reporting("decode", {}, {"prompt_tokens": 700.0}))
    assert decode["pdserve_prompt_tokens_total",] == 0, "decode counts the prompts of finished requests in the frontend"


def test_prompt_tokens_are_counted_anew_after_a_role_switch() -> None:
    """The frontend counts them on decode, the leader on prefill. If the counter jumped back to its value in the former
    role, Prometheus would compute a false rate.
    """
    metrics = reporting("decode", {}, {"prompt_tokens": 5.0})
    metrics.request_ended(Finished("a", FinishReason("stop"), 1000, 2, 0, {}), 1.0, first_sample=True)
    seen = [samples_of(metrics)["pdserve_prompt_tokens_total",]]
    for role in ("prefill", "decode"):
        metrics.set_role(role)
        seen.append(samples_of(metrics)["pdserve_prompt_tokens_total",])
    assert seen == [1000, 5, 0]


def test_stage_histograms_have_the_timeline_of_finished_requests() -> None:
    metrics = Metrics()
    finished = Finished("a", FinishReason("stop"), 100, 8, 0, TIMELINE)
    metrics.request_ended(finished, 36.0, first_sample=True)
    metrics.request_ended(Finished("b", FinishReason("length"), 100, 1, 0, {}), 1.0, first_sample=False)
    metrics.request_ended(Failed("c", 503, "unavailable", "no prefill server"), 1.0, first_sample=True)
    found = samples_of(metrics)
    assert TIMELINE.keys() == set(STAGES)
    for stage, seconds in TIMELINE.items():
        assert found["pdserve_request_stage_seconds_sum", stage] == seconds
        assert found["pdserve_request_stage_seconds_count", stage] == 2
    assert found["pdserve_request_queue_time_seconds_sum",] == 3
    assert found["pdserve_request_time_per_output_token_seconds_sum",] == 3, "21 s after the first of eight tokens"
    assert found["pdserve_request_time_per_output_token_seconds_count",] == 1, "none after a single token"
    assert found["pdserve_request_prompt_tokens_count",] == 1, "the samples share their prompt"
    assert found["pdserve_request_generation_tokens_sum",] == 9


def test_stages_are_those_of_a_timeline() -> None:
    simulator = TimedSimulator(tokens_per_s=1e6)
    simulator.run_for(1.0)
    simulator.ask("r", 100)
    simulator.run(lambda: "r" in simulator.timelines)
    assert list(simulator.timelines["r"]) == list(STAGES)


def test_process_metrics_are_exported() -> None:
    found = samples_of(reporting("decode", {}, {}))
    assert found["process_resident_memory_bytes",] > 1e6
    assert not [name for name, *_ in found if name.startswith("pdserve_leader_process")], "no leader was started"
