"""Prometheus metrics of one server: measured by the frontend, or reported by the leader (leader_metrics.py).

docs/metrics.md lists all of them.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ...common.logs import dropped_lines
from ...scheduler.messages.frontend import Failed, Finished
from .catalog import COUNTERS
from .leader_metrics import LeaderCollector, LeaderView, leader_process_collector
from .stages import AFTER_FIRST_TOKEN, STAGES
from .versions import installed_versions

LATENCY_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
INTER_TOKEN_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
STAGE_BUCKETS_S = (0.0005, 0.001, 0.002, *LATENCY_BUCKETS_S)
TOKEN_BUCKETS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072, 524288)


class Metrics:
    """Owns two registries: one for metrics of every server, one for those that only a decode server measures. After
    `watch_leader`, every scrape also reads the leader's latest report.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped there; *_created doubles the series
        self.registry = CollectorRegistry()
        self._of_decode = CollectorRegistry()
        self._decodes = True
        counter = partial(Counter, registry=self._of_decode)
        latency = partial(Histogram, buckets=LATENCY_BUCKETS_S, registry=self._of_decode)
        self._requests = counter("pdserve_requests", "Requests that have ended, by outcome.", ["outcome"])
        refused = "HTTP requests refused before they reached the engine, by error code."
        self._refused = Counter("pdserve_requests_refused", refused, ["code"], registry=self.registry)
        to_first_token = "From acceptance to the first output token."
        self._first_token = latency("pdserve_time_to_first_token_seconds", to_first_token)
        self._tokens = _TokenCollector()
        self._of_decode.register(self._tokens)
        to_end = "From acceptance to the end of a request that finished."
        self._end_to_end = latency("pdserve_e2e_request_latency_seconds", to_end)
        queued = "Time of a finished request in queues: for KV memory, and behind other prompts."
        self._queued = latency("pdserve_request_queue_time_seconds", queued)
        self._stages = _stage_histograms(self._of_decode)
        per_token = "Mean time per output token after the first, of each finished request."
        self._per_token = latency(
            "pdserve_request_time_per_output_token_seconds", per_token, buckets=INTER_TOKEN_BUCKETS_S
        )
        sizes = partial(Histogram, buckets=TOKEN_BUCKETS, registry=self._of_decode)
        self._prompt_sizes = sizes("pdserve_request_prompt_tokens", "Prompt tokens of finished requests.")
        self._output_sizes = sizes("pdserve_request_generation_tokens", "Output tokens of finished requests.")
        self._prompt_tokens = counter("pdserve_prompt_tokens", COUNTERS["prompt_tokens"].help)
        self._role = Gauge("pdserve_role", "1 for the role of this server.", ["role"], registry=self.registry)
        switches = "Role switches that have ended, by the requested role and outcome: done or failed."
        self._switches = Counter("pdserve_role_switches", switches, ["role", "outcome"], registry=self.registry)
        lag = "Longest lag of the HTTP event loop in the last minute."
        self._lag = Gauge("pdserve_frontend_lag_seconds", lag, registry=self.registry)
        versions = installed_versions()
        build = Gauge(
            "pdserve_build_info", "1, with the installed versions as labels.", list(versions), registry=self.registry
        )
        build.labels(**versions).set(1)
        self.registry.register(_LogCollector())
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def watch_lag(self, lag_s: Callable[[], float]) -> None:
        """From now on, also export how late the event loop of this process is."""
        self._lag.set_function(lag_s)

    def watch_leader(self, leader: Callable[[], LeaderView], pid: Callable[[], int | None] = lambda: None) -> None:
        """From now on, also export the latest report of the current leader, and the metrics of its process."""
        measured = frozenset(family.name for family in self._of_decode.collect())
        self.registry.register(LeaderCollector(leader, lambda: measured if self._decodes else frozenset()))
        self.registry.register(leader_process_collector(pid))

    def tokens_arrived(self, count: int, opened_at: float, last_token_at: float | None, now: float) -> None:
        """Count `count` output tokens that arrived together; the time since the last one is divided among them."""
        if last_token_at is not None:
            self._tokens.add(count, now - last_token_at)
        elif count:
            self._first_token.observe(now - opened_at)
            self._tokens.add(1)
            self._tokens.add(count - 1, 0.0)

    def request_ended(self, end: Finished | Failed, elapsed_s: float, *, first_sample: bool) -> None:
        """Count a request that has ended. Prompt tokens count only for the first sample, because samples share a
        prompt.
        """
        if isinstance(end, Failed):
            self._requests.labels(end.code).inc()
            return
        self._requests.labels(end.reason.type).inc()
        self._end_to_end.observe(elapsed_s)
        self._output_sizes.observe(end.completion_tokens)
        self._stages_ended(end.timeline, end.completion_tokens)
        if first_sample:
            self._prompt_tokens.inc(end.prompt_tokens)
            self._prompt_sizes.observe(end.prompt_tokens)

    def _stages_ended(self, timeline: Mapping[str, float], tokens: int) -> None:
        for stage, histogram in self._stages.items():
            histogram.observe(timeline.get(stage, 0.0))
        self._queued.observe(timeline.get("queue", 0.0) + timeline.get("prefill_queue", 0.0))
        if tokens > 1:
            after_first_s = sum(timeline.get(stage, 0.0) for stage in AFTER_FIRST_TOKEN)
            self._per_token.observe(after_first_s / (tokens - 1))

    def set_role(self, role: str) -> None:
        self._decodes = role == "decode"
        # On prefill, the leader exports a counter with this name. Ours starts at 0 after every switch: a counter may be
        # reset, but it must not jump back to an old value.
        self._prompt_tokens.reset()
        self._role.clear()
        self._role.labels(role).set(1)

    def role_switch_ended(self, role: str, outcome: Literal["done", "failed"]) -> None:
        self._switches.labels(role, outcome).inc()

    def request_refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    def render(self, accept: str) -> bytes:
        """The metrics in the format that the scraper accepts."""
        encoder, _ = choose_encoder(accept)
        return encoder(_WithSamples(self.families))

    def families(self) -> Iterable[Metric]:
        """All metric families of this server in its role."""
        yield from self.registry.collect()
        if self._decodes:
            yield from self._of_decode.collect()


def content_type_of(accept: str) -> str:
    """Of the format of metrics that a scraper accepts."""
    _, content_type = choose_encoder(accept)
    return content_type


def _stage_histograms(registry: CollectorRegistry) -> dict[str, Histogram]:
    """Returns a histogram for each stage. All stages are exported from the start, also those without requests."""
    text = (
        "Time of finished requests in each stage, as in `meta_info.timeline`. 0 counts for a stage that was not needed."
    )
    by_stage = Histogram("pdserve_request_stage_seconds", text, ["stage"], buckets=STAGE_BUCKETS_S, registry=registry)
    return {stage: by_stage.labels(stage) for stage in STAGES}


class _WithSamples(CollectorRegistry):
    """The given metric families, without empty ones. An empty family has no labels. sglang-router, which sums the
    metrics of all servers, fails if a family has labels on one server and none on another.
    """

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        super().__init__()
        self._all = families

    def collect(self) -> Iterable[Metric]:
        return (family for family in self._all() if family.samples)


class _LogCollector(Collector):
    """Counts the lines that the frontend could not log."""

    def collect(self) -> Iterable[Metric]:
        text = "Log lines of the frontend that were dropped, because nobody has read the log."
        yield CounterMetricFamily("pdserve_frontend_log_lines_dropped", text, dropped_lines())


class _TokenCollector(Collector):
    """Counts every output token, cheaply. prometheus_client's counters take a lock each time and its histograms visit
    every bucket, which would double the frontend's time per token.

    Not thread-safe: tokens arrive and scrapes are served on the same event loop.
    """

    def __init__(self) -> None:
        self._count = 0
        self._latencies = [0] * (len(INTER_TOKEN_BUCKETS_S) + 1)
        """Number of tokens per bucket: up to each bound, and above the last one."""
        self._latency_sum_s = 0.0

    def add(self, count: int, after_s: float | None = None) -> None:
        """Count tokens that arrived together, and the time since the previous token; None for the first ones."""
        self._count += count
        if after_s is not None and count:
            self._latencies[bisect_left(INTER_TOKEN_BUCKETS_S, after_s / count)] += count
            self._latency_sum_s += after_s

    def collect(self) -> Iterable[Metric]:
        bounds = [*map(floatToGoString, INTER_TOKEN_BUCKETS_S), "+Inf"]
        yield HistogramMetricFamily(
            "pdserve_inter_token_latency_seconds",
            "Between two output tokens of a request.",
            buckets=list(zip(bounds, accumulate(self._latencies), strict=True)),
            sum_value=self._latency_sum_s,
        )
        yield CounterMetricFamily("pdserve_generation_tokens", "Output tokens.", self._count)
