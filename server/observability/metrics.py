"""Prometheus metrics of one server: measured by the frontend, or reported by the leader in its Status.

`kv_pages_free` of the leader is exported as `pdserve_kv_pages_free`; counters end in `_total`.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ...scheduler.messages.frontend import DpRankStatus, Failed, Finished, Status

PREFIX = "pdserve_"
LABELLED = {"path_bytes": "path"}
"""Counters of the leader that are one metric with this label: the rest of their name is its value."""
METRIC_NAME = re.compile(r"^[a-zA-Z_][a-zA-Z0-9_]*$")
LATENCY_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
INTER_TOKEN_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """Owns the registry. After `watch_leader`, every scrape reads `status` and `loop_age_s`."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped there; *_created doubles the series
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        latency = partial(Histogram, buckets=LATENCY_BUCKETS_S, registry=self.registry)
        self._requests = counter("pdserve_requests", "Requests that have ended, by outcome.", ["outcome"])
        refused = "HTTP requests refused before they reached the engine, by error code."
        self._refused = counter("pdserve_requests_refused", refused, ["code"])
        to_first_token = "From acceptance to the first output token."
        self._first_token = latency("pdserve_time_to_first_token_seconds", to_first_token)
        self._tokens = _TokenCollector()
        self.registry.register(self._tokens)
        to_end = "From acceptance to the end of a request that finished."
        self._end_to_end = latency("pdserve_e2e_request_latency_seconds", to_end)
        self._prompt_tokens = counter("pdserve_prompt_tokens", "Prompt tokens of finished requests.")
        self._role = Gauge("pdserve_role", "1 for the role of this server.", ["role"], registry=self.registry)
        switches = "Role switches that have ended, by the requested role and outcome: done or failed."
        self._switches = counter("pdserve_role_switches", switches, ["role", "outcome"])

    def watch_leader(self, status: Callable[[], Status | None], loop_age_s: Callable[[], float]) -> None:
        """Export the leader's latest Status from now on."""
        taken = frozenset(family.name for family in self.registry.collect())
        self.registry.register(_LeaderCollector(status, loop_age_s, taken))

    def tokens_arrived(self, count: int, opened_at: float, last_token_at: float | None, now: float) -> None:
        """Count `count` output tokens that arrived together; they share the latency evenly."""
        if last_token_at is not None:
            self._tokens.add(count, now - last_token_at)
        elif count:
            self._first_token.observe(now - opened_at)
            self._tokens.add(1)
            self._tokens.add(count - 1, 0.0)

    def request_ended(self, end: Finished | Failed, elapsed_s: float, *, first_sample: bool) -> None:
        """The samples of a prompt share it: its tokens count once."""
        if isinstance(end, Failed):
            self._requests.labels(end.code).inc()
            return
        self._requests.labels(end.reason.type).inc()
        self._end_to_end.observe(elapsed_s)
        if first_sample:
            self._prompt_tokens.inc(end.prompt_tokens)

    def set_role(self, role: str) -> None:
        self._role.clear()
        self._role.labels(role).set(1)

    def role_switch_ended(self, role: str, outcome: Literal["done", "failed"]) -> None:
        self._switches.labels(role, outcome).inc()

    def request_refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    def render(self, accept: str) -> tuple[bytes, str]:
        """The metrics and their content type, in the format that the scraper accepts."""
        encoder, content_type = choose_encoder(accept)
        return encoder(_WithSamples(self.registry)), content_type


class _WithSamples(CollectorRegistry):
    """The metric families of another registry that have samples. sglang-router sums the metrics of all servers, and
    fails when a family has labels on one server and, because it is empty, no labels on another.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        return (family for family in self._registry.collect() if family.samples)


class _TokenCollector(Collector):
    """Counts every output token. prometheus_client's counters take a lock each time and its histograms visit every
    bucket, which would double the frontend's time per token.

    For one thread: tokens arrive and scrapes are served on the event loop.
    """

    def __init__(self) -> None:
        self._count = 0
        self._latencies = [0] * (len(INTER_TOKEN_BUCKETS_S) + 1)
        """Tokens with a latency up to each bound, and above the last bound."""
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


class _LeaderCollector(Collector):
    """Turns the leader's Status into metric families at scrape time. Names that the frontend uses are left out."""

    def __init__(
        self, status: Callable[[], Status | None], loop_age_s: Callable[[], float], taken: frozenset[str]
    ) -> None:
        self._status = status
        self._loop_age_s = loop_age_s
        self._taken = taken

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        if status is None:
            return
        age = GaugeMetricFamily("pdserve_loop_age_seconds", "How long ago the engine loop last turned.")
        age.add_metric([], self._loop_age_s())
        yield age
        seen = {*self._taken, age.name}
        families = ((GaugeMetricFamily, "", status.gauges), (CounterMetricFamily, "_total", status.counters))
        for metric, label in LABELLED.items():
            labelled = CounterMetricFamily(PREFIX + metric, f"Reported by the engine, by {label}.", labels=[label])
            for name, value in status.counters.items():
                if name.startswith(f"{metric}_"):
                    labelled.add_metric([name.removeprefix(f"{metric}_")], value)
                    seen.add(PREFIX + name)
            if labelled.samples:
                yield labelled
        for family, suffix, reported in families:
            for name, value in reported.items():
                full_name = PREFIX + name.removeprefix(PREFIX).removesuffix(suffix)
                if full_name not in seen and METRIC_NAME.match(name):
                    seen.add(full_name)
                    yield family(full_name, f"Reported by the engine: {name}.", value)
        states = GaugeMetricFamily("pdserve_requests_in_state", "Live requests by state.", labels=["state"])
        for state, count in status.states.items():
            states.add_metric([state], count)
        yield states
        yield from _dp_rank_families(status.dp_ranks)
        labels = ["endpoint", "instance_id"]  # prefill knows only the address, which several decode servers may share
        paired = GaugeMetricFamily("pdserve_peer_paired", "1 while the peer is paired.", labels=labels)
        round_trip = GaugeMetricFamily(
            "pdserve_peer_round_trip_seconds", "Heartbeat round trip to the peer.", labels=labels
        )
        for names, peer in {(peer.endpoint, peer.instance or ""): peer for peer in status.peers}.items():
            paired.add_metric(names, float(peer.state == "paired"))
            if peer.round_trip_ms is not None:
                round_trip.add_metric(names, peer.round_trip_ms / 1000)
        yield paired
        yield round_trip


def _dp_rank_families(ranks: Sequence[DpRankStatus]) -> Iterable[Metric]:
    """The gauges of each data-parallel rank, and its requests by state."""
    families: dict[str, GaugeMetricFamily] = {}
    for rank in ranks:
        for name, value in rank.gauges.items():
            if name not in families:
                help_text = f"Of each data-parallel rank: {name}."
                families[name] = GaugeMetricFamily(f"{PREFIX}dp_rank_{name}", help_text, labels=["dp_rank"])
            families[name].add_metric([str(rank.dp_rank)], value)
    yield from families.values()
    states = GaugeMetricFamily(
        "pdserve_dp_rank_requests_in_state",
        "Live requests of each data-parallel rank by state.",
        labels=["dp_rank", "state"],
    )
    for rank in ranks:
        for state, count in rank.states.items():
            states.add_metric([str(rank.dp_rank), state], count)
    yield states
