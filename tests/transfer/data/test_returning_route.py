"""A dropped RDMA route is used again when it works. Engines are stubs; tests/rdma has real ones."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest
import torch

from pdserve.transfer.data import routed_engine
from pdserve.transfer.data.routed_engine import PoolPair, RoutedEngine
from pdserve.transfer.data.sender import PeerSender, SendJob, SendResult
from pdserve.transfer.mooncake.engine import WriteId, WriteState
from pdserve.transfer.mooncake.library import Transport
from pdserve.transfer.mooncake.rdma_engine import RdmaEngine
from pdserve.transfer.mooncake.sockets import PeerUnreachableError, Region
from pdserve.transfer.mooncake.transports import KvRoute, LocalTransport
from pdserve.transfer.plan.copy_runs import CopyRuns
from pdserve.transfer.protocol.layout import KvLayout, Plane
from pdserve.transfer.protocol.messages import Pool, TransferKey

POOLS = PoolPair(Region(4096, 64), Pool(KvLayout((Plane("k", 1),), 0, 1, 0, 1, 1, 64, "uint8"), 1 << 20, 64))
ROUTES = (KvRoute("rdma", "127.0.0.1:3"), KvRoute("tcp", "127.0.0.1:1"))
DOWN = "no port is active: mlx5_0 is DOWN"
SOON_S = 0.01


@dataclass
class Network:
    """What the engines of a sender run into."""

    broken: set[Transport] = field(default_factory=set)
    port_problem: str | None = None
    holds: bool = False
    """Writes do not end."""
    failing: set[Transport] = field(default_factory=set)
    """Writes of KV fail."""
    write_s: float = 0.0
    """How long a write takes."""
    tried: "queue.SimpleQueue[Transport]" = field(default_factory=queue.SimpleQueue)
    written: list[Transport] = field(default_factory=list)
    open: int = 0

    def engine(self, _session: str, _targets: object, *, transport: Transport, **_options: object) -> "StubEngine":
        self.tried.put(transport)
        if transport in self.broken:
            raise PeerUnreachableError(f"{transport} is broken")
        self.open += 1
        return StubEngine(self, transport)


@dataclass
class StubEngine:
    network: Network
    transport: Transport
    submitted_at: float = 0.0

    def submit(self, *_: int) -> WriteId | None:
        self.network.written.append(self.transport)
        self.submitted_at = time.monotonic()
        return WriteId(len(self.network.written))

    def poll(self, _write: WriteId) -> WriteState:
        ended = not self.network.holds and time.monotonic() >= self.submitted_at + self.network.write_s
        if self.transport in self.network.failing:
            return WriteState.FAILED
        return WriteState.DONE if ended else WriteState.PENDING

    def delivered_bytes(self) -> int | None:
        return None

    def destroy(self) -> None:
        self.network.open -= 1


@dataclass
class Routed:
    sender: PeerSender
    routes: "queue.SimpleQueue[tuple[Transport, dict[Transport, str]]]"
    results: "queue.SimpleQueue[SendResult]"

    def submit(self, size_bytes: int = 64, writes: int = 1) -> None:
        runs = CopyRuns(np.zeros(writes, int), np.zeros(writes, int), np.full(writes, size_bytes))
        self.sender.submit(SendJob(TransferKey(1, 1), runs, POOLS, self.results.put))

    def send(self, size_bytes: int = 64) -> SendResult:
        self.submit(size_bytes)
        return self.results.get(timeout=10)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    made = Network()
    monkeypatch.setattr(routed_engine, "SendEngine", made.engine)
    monkeypatch.setattr(routed_engine, "describe_engine", lambda *_: None)
    monkeypatch.setattr(routed_engine, "port_problem", lambda _: made.port_problem)
    return made


@pytest.fixture
def start(network: Network) -> Iterator[Callable[[], Routed]]:
    started: list[PeerSender] = []

    def start() -> Routed:
        routes: queue.SimpleQueue[tuple[Transport, dict[Transport, str]]] = queue.SimpleQueue()
        results: queue.SimpleQueue[SendResult] = queue.SimpleQueue()
        sender = PeerSender(
            ROUTES,
            [POOLS],
            window=4,
            on_routed=lambda transport, dropped: routes.put((transport, dict(dropped))),
            local=LocalTransport("auto", "127.0.0.1", ("mlx5_0",), rdma=cast(RdmaEngine, object())),
        )
        started.append(sender)
        return Routed(sender, routes, results)

    yield start
    for sender in started:
        sender.close()
    assert network.open == 0, "an engine was not destroyed"


def test_a_dropped_route_is_used_again_without_a_request(
    network: Network, start: Callable[[], Routed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed_engine, "RETRY_S", SOON_S)
    network.broken = {"rdma"}
    routed = start()
    assert routed.routes.get(timeout=5) == ("tcp", {"rdma": "rdma is broken"})
    for transport in ("rdma", "tcp", "rdma", "rdma"):  # is tried again and again
        assert network.tried.get(timeout=5) == transport
    network.broken = set()
    assert routed.routes.get(timeout=5) == ("rdma", {})
    assert routed.send().ok
    assert network.written == ["rdma"]


def test_a_peer_that_pairs_again_has_its_route_tried_at_once(network: Network, start: Callable[[], Routed]) -> None:
    network.broken = {"rdma"}
    routed = start()
    assert routed.routes.get(timeout=5)[0] == "tcp"
    network.broken = set()
    routed.sender.try_again()
    assert routed.routes.get(timeout=5) == ("rdma", {})


def test_a_request_takes_the_next_route_at_once_while_the_port_is_down(
    network: Network, start: Callable[[], Routed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed_engine, "RETRY_S", SOON_S)
    routed = start()
    assert [(sent := routed.send()).transport, sent.bytes_written] == ["rdma", 64]
    network.port_problem = DOWN
    assert [(sent := routed.send()).transport, sent.bytes_written] == ["tcp", 64]
    assert network.written == ["rdma", "tcp"]
    assert routed.routes.get(timeout=5) == ("rdma", {})
    assert routed.routes.get(timeout=5) == ("tcp", {"rdma": DOWN})
    network.port_problem = None
    assert routed.routes.get(timeout=5) == ("rdma", {})
    tried = [network.tried.get_nowait() for _ in range(3)]
    assert tried == ["rdma", "tcp", "rdma"], "a route was tried while its port was down"


def test_writes_fail_at_once_when_the_port_goes_down(network: Network, start: Callable[[], Routed]) -> None:
    routed = start()
    network.holds = True
    routed.submit()
    while not network.written:
        time.sleep(0.001)
    network.port_problem = DOWN
    started = time.monotonic()
    failed = routed.results.get(timeout=10)
    assert time.monotonic() - started < 0.9, "it waited until the writes counted as stalled"
    assert DOWN in failed.reason
    assert failed.late_writes
    network.holds = False
    assert routed.send().ok
    assert network.written == ["rdma", "tcp"]


def test_no_request_waits_for_a_trial(
    network: Network, start: Callable[[], Routed], monkeypatch: pytest.MonkeyPatch
) -> None:
    network.broken = {"rdma"}
    routed = start()
    assert routed.routes.get(timeout=5)[0] == "tcp"
    trying, goes_on = threading.Event(), threading.Event()

    def slow(*arguments: object, **options: object) -> StubEngine:
        trying.set()
        assert goes_on.wait(10)
        return network.engine(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(routed_engine, "SendEngine", slow)
    network.broken = set()
    routed.sender.try_again()
    assert trying.wait(5)
    assert routed.send().ok
    assert network.written == ["tcp"]
    goes_on.set()
    assert routed.routes.get(timeout=5) == ("rdma", {})


def test_a_slow_peer_is_not_stalled_over_rdma(network: Network, start: Callable[[], Routed]) -> None:
    """A write that takes longer than a second, after writes that show how slow the peer is."""
    routed = start()
    network.write_s = 0.1
    for _ in range(4):
        assert routed.send(8).ok
    network.write_s = 1.4
    assert routed.send(64).ok


def test_an_idle_sender_notices_that_its_port_was_down(
    network: Network, start: Callable[[], Routed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mooncake does not use the port for some time, so the next write would fail."""
    monkeypatch.setattr(routed_engine, "LOOK_S", SOON_S)
    routed = start()
    assert routed.routes.get(timeout=5) == ("rdma", {})
    network.port_problem = DOWN
    assert routed.routes.get(timeout=5) == ("tcp", {"rdma": DOWN})
    network.port_problem, network.broken = None, {"rdma"}
    assert routed.send().ok
    assert network.written == ["tcp"]


def test_a_port_that_is_down_leaves_a_sender_without_other_routes_alive(
    network: Network, start: Callable[[], Routed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed_engine, "LOOK_S", SOON_S)
    routed = start()
    assert routed.routes.get(timeout=5) == ("rdma", {})
    network.broken, network.port_problem = {"tcp"}, DOWN
    while network.open:
        time.sleep(0.001)
    assert "tcp is broken" in routed.send().reason
    network.broken, network.port_problem = set(), None
    assert routed.send().ok


def test_a_cancelled_write_over_rdma_does_not_wait_as_long_as_a_slow_peer_may(
    network: Network, start: Callable[[], Routed]
) -> None:
    """A small write that was held up made the peer look slow."""
    routed = start()
    network.write_s = 0.2
    for _ in range(4):
        assert routed.send(8).ok
    network.holds = True
    routed.submit()
    while len(network.written) < 5:
        time.sleep(0.001)
    started = time.monotonic()
    routed.sender.cancel(TransferKey(1, 1))
    result = routed.results.get(timeout=30)
    assert result.cancelled
    assert time.monotonic() - started < 4, "as long as the writes of a slow peer: 6.4 s"


def test_a_probe_that_raises_leaves_no_engine(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        assert network.open == 1
        raise RuntimeError("the GPU does not answer")

    monkeypatch.setattr(routed_engine, "probe", fail)
    pools = PoolPair(POOLS.source, POOLS.destination, torch.zeros(64, dtype=torch.uint8))
    routed = RoutedEngine(ROUTES[1:], [pools], LocalTransport("auto", "127.0.0.1"), lambda *_: None)
    with pytest.raises(RuntimeError, match="the GPU does not answer"):
        routed.open()
    assert network.open == 0


def test_a_route_that_fails_after_each_return_has_to_pass_more_trials(
    network: Network, start: Callable[[], Routed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed_engine, "RETRY_S", SOON_S)
    network.failing = {"rdma"}
    routed = start()
    assert routed.routes.get(timeout=5) == ("rdma", {})
    for trials in (1, 2, 4):
        while not network.tried.empty():
            network.tried.get_nowait()
        assert not routed.send().ok
        assert routed.routes.get(timeout=5)[0] == "rdma"
        tried = [network.tried.get_nowait() for _ in range(network.tried.qsize())]
        assert tried.count("rdma") == trials
    network.failing, network.port_problem = set(), DOWN
    assert routed.send().ok
    network.port_problem = None
    while routed.routes.get(timeout=5)[0] != "rdma":
        pass
    assert routed.send().transport == "rdma"


def test_a_peer_is_stalled_when_one_write_takes_too_long_however_many_are_in_flight(
    network: Network, start: Callable[[], Routed]
) -> None:
    routed = start()
    network.write_s = 0.4
    for _ in range(4):
        assert routed.send(8).ok
    network.holds = True
    routed.submit(8, writes=4)
    while len(network.written) < 8:
        time.sleep(0.001)
    started = time.monotonic()
    assert "made no progress" in routed.results.get(timeout=30).reason
    assert time.monotonic() - started < 4, "as long as four writes may take: 6.4 s"


def test_a_peer_that_paired_again_before_a_route_failed_does_not_have_it_tried_at_once(
    network: Network, start: Callable[[], Routed]
) -> None:
    """Trials are small: they may pass at once, and the next KV fails again."""
    routed = start()
    assert routed.routes.get(timeout=5) == ("rdma", {})
    routed.sender.try_again()
    network.failing = {"rdma"}
    assert not routed.send().ok
    assert routed.send().transport == "tcp"
    assert network.tried.get(timeout=5) == "rdma"
    assert network.tried.get(timeout=5) == "tcp"
    with pytest.raises(queue.Empty):
        network.tried.get(timeout=0.2)
    routed.sender.try_again()
    assert network.tried.get(timeout=5) == "rdma"


def test_an_error_while_a_sender_is_idle_does_not_end_it(
    start: Callable[[], Routed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver of an HCA is loaded again, and its device has just been removed."""
    monkeypatch.setattr(routed_engine, "LOOK_S", SOON_S)
    routed = start()
    assert routed.routes.get(timeout=5) == ("rdma", {})
    looked = threading.Event()

    def removed(_: object) -> str | None:
        looked.set()
        raise FileNotFoundError("/sys/class/infiniband/mlx5_0/ports")

    monkeypatch.setattr(routed_engine, "port_problem", removed)
    assert looked.wait(5)
    monkeypatch.setattr(routed_engine, "port_problem", lambda _: None)
    assert routed.send().ok
