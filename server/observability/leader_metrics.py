"""Converts the leader's latest report to metric families when a scraper asks for them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...scheduler.messages.frontend import DpRankStatus, PeerStatus, Ready, Status
from ...scheduler.messages.lifecycle import PrefillState, State
from .catalog import COUNTERS, GAUGES, PREFIX, Exported, exported_as, rank_counter

WAITING_STATES = tuple(state.value for state in (State.COMPILING, State.QUEUED, State.SAVED, PrefillState.WAITING))
"""Requests in these states have no KV memory. The others hold some; of those that are CLOSING, only until their writes
have ended.
"""


class LeaderView(Protocol):
    """The latest reports of a leader; None before the first one."""

    @property
    def ready(self) -> Ready | None: ...
    @property
    def status(self) -> Status | None: ...
    @property
    def loop_age_s(self) -> float: ...


class LeaderCollector(Collector):
    """Collects the metrics of the current leader, except those in `taken()`, which the frontend measures itself."""

    def __init__(self, leader: Callable[[], LeaderView], taken: Callable[[], frozenset[str]]) -> None:
        self._leader = leader
        self._taken = taken

    def collect(self) -> Iterable[Metric]:
        leader = self._leader()
        if leader.ready is not None:
            yield from _ready_families(leader.ready)
        status = leader.status
        if status is None:
            return
        yield _gauge("loop_age_seconds", "Time since the last iteration of the engine loop.", leader.loop_age_s)
        yield _gauge("step_age_seconds", "How long the current step has run; 0 without one.", status.step_age_s)
        yield from _router_families(status)
        taken = self._taken()
        yield from (family for family in _reported_families(status) if family.name not in taken)
        states = GaugeMetricFamily(PREFIX + "requests_in_state", "Live requests by state.", labels=["state"])
        for state, count in status.states.items():
            states.add_metric([state], count)
        yield states
        yield from _dp_rank_families(status.dp_ranks)
        yield from _peer_families(status.peers)


def leader_process_collector(pid: Callable[[], int | None]) -> ProcessCollector:
    """Collects CPU time, memory and open files of the leader process, in which a single rank runs as well. Collects
    nothing if there is no process.
    """
    return ProcessCollector(namespace=PREFIX + "leader", pid=lambda: pid() or -1, registry=None)


def _ready_families(ready: Ready) -> Iterable[Metric]:
    model = ready.model
    labels = {
        "model_name": model.name,
        "architecture": model.architecture,
        "dtype": model.dtype,
        "device": model.device,
        "fingerprint": model.fingerprint,
        "instance_id": ready.instance,
    }
    info = GaugeMetricFamily(PREFIX + "model_info", "1, with the served model as labels.", labels=list(labels))
    info.add_metric(list(labels.values()), 1)
    yield info
    pool = GaugeMetricFamily(
        PREFIX + "cache_config_info",
        "1, with the page size in tokens and the number of KV pages as labels, as llm-d's router reads them.",
        labels=["block_size", "num_gpu_blocks"],
    )
    pool.add_metric([str(ready.page_size), str(ready.num_pages)], 1)
    yield pool


def _router_families(status: Status) -> Iterable[Metric]:
    """The three gauges that routers balance by. Without labels: llm-d's router reads one series of each."""
    waiting = sum(count for state, count in status.states.items() if state in WAITING_STATES)
    running = sum(
        count for state, count in status.states.items() if state not in (*WAITING_STATES, PrefillState.CLOSING.value)
    )
    yield _gauge("num_requests_waiting", "Requests that wait for KV memory or, on prefill, for a step.", waiting)
    yield _gauge("num_requests_running", "Requests that hold KV memory.", running)
    pages, held = (status.gauges.get(name, 0.0) for name in ("kv_pages", "kv_pages_held"))
    usage = "Share of the KV pool that requests hold, from 0 to 1. Cached prefixes do not count."
    yield _gauge("kv_cache_usage_ratio", usage, held / pages if pages else 0.0)


def _reported_families(status: Status) -> Iterable[Metric]:
    counters = [(exported_as(name, COUNTERS), value) for name, value in status.counters.items()]
    gauges: list[tuple[Exported, float]] = []
    for name, value in status.gauges.items():
        if (counter := rank_counter(name)) is not None:
            counters.append((counter, value))
        else:
            gauges.append((exported_as(name, GAUGES), value))
    yield from _families(GaugeMetricFamily, gauges)
    yield from _families(CounterMetricFamily, counters)


def _families(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily], values: Iterable[tuple[Exported, float]]
) -> Iterable[Metric]:
    """One family per name."""
    found: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for exported, value in values:
        labels: Mapping[str, str] = dict(exported.labels)
        if exported.name not in found:
            found[exported.name] = kind(PREFIX + exported.name, exported.help, labels=list(labels))
        found[exported.name].add_metric(list(labels.values()), value)
    return found.values()


def _dp_rank_families(ranks: Sequence[DpRankStatus]) -> Iterable[Metric]:
    """The gauges of each data-parallel rank, and its requests by state."""
    gauges = [
        (_of_dp_rank(exported_as(name, GAUGES), rank.dp_rank), value)
        for rank in ranks
        for name, value in rank.gauges.items()
    ]
    yield from _families(GaugeMetricFamily, gauges)
    states = GaugeMetricFamily(
        PREFIX + "dp_rank_requests_in_state",
        "Live requests of each data-parallel rank by state.",
        labels=["dp_rank", "state"],
    )
    for rank in ranks:
        for state, count in rank.states.items():
            states.add_metric([str(rank.dp_rank), state], count)
    yield states


def _of_dp_rank(exported: Exported, dp_rank: int) -> Exported:
    text = f"Of each data-parallel rank: {exported.help}"
    return Exported(f"dp_rank_{exported.name}", text, (("dp_rank", str(dp_rank)), *exported.labels))


def _peer_families(peers: Sequence[PeerStatus]) -> Iterable[Metric]:
    labels = ["endpoint", "instance_id"]  # prefill knows only the address, which several decode servers may share
    paired = GaugeMetricFamily(PREFIX + "peer_paired", "1 while the peer is paired.", labels=labels)
    round_trip = GaugeMetricFamily(
        PREFIX + "peer_round_trip_seconds", "Heartbeat round trip to the peer.", labels=labels
    )
    unusable = GaugeMetricFamily(
        PREFIX + "transport_unusable",
        "1 while KV for the peer does not use this transport because it does not work (prefill).",
        labels=[*labels, "transport"],
    )
    for names, peer in {(peer.endpoint, peer.instance or ""): peer for peer in peers}.items():
        paired.add_metric(names, float(peer.state == "paired"))
        if peer.round_trip_ms is not None:
            round_trip.add_metric(names, peer.round_trip_ms / 1000)
        for transport in peer.unusable_transports:
            unusable.add_metric([*names, transport], 1.0)
    yield paired
    yield round_trip
    if unusable.samples:
        yield unusable
    addresses = GaugeMetricFamily(
        PREFIX + "prefill_addresses", "IP addresses that the host name of a prefill endpoint has.", labels=["endpoint"]
    )
    for endpoint, count in Counter(peer.endpoint for peer in peers if peer.address is not None).items():
        addresses.add_metric([endpoint], count)
    yield addresses


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value)
