"""A sender probes its transports in order and uses the first that works. If that one fails, it uses the next."""

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from pdserve.transfer.data import routed_engine
from pdserve.transfer.data.probe import PATTERN_BYTES, TIMEOUT_S, probe
from pdserve.transfer.data.routed_engine import PoolPair
from pdserve.transfer.data.sender import PeerSender, SendJob, SendResult
from pdserve.transfer.mooncake.engine import SendEngine, WriteId, WriteState
from pdserve.transfer.mooncake.library import Transport
from pdserve.transfer.mooncake.sockets import PeerUnreachableError, Region
from pdserve.transfer.mooncake.transports import KvRoute
from pdserve.transfer.plan.copy_runs import CopyRuns
from pdserve.transfer.protocol.layout import KvLayout, Plane
from pdserve.transfer.protocol.messages import Pool, TransferKey
from tests.transfer.data.kv_receiver import Receiver

POOL_BYTES, PROBE_BYTES = 4096, 64
ROW = KvLayout((Plane("k", 1),), 0, 1, 0, 1, 1, POOL_BYTES, "uint8")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver(POOL_BYTES + PROBE_BYTES) as process:
        yield process


def pool_of(receiver: Receiver) -> Pool:
    base = receiver.base_address
    return Pool(ROW, base, POOL_BYTES, "host", probe_address=base + POOL_BYTES, probe_bytes=PROBE_BYTES)


class TestProbe:
    """With real engines between two processes."""

    def test_probe_writes_and_reads_back_behind_the_pages(self, receiver: Receiver) -> None:
        receiver.pool[:] = 7
        local = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
        engine = SendEngine(receiver.session, [receiver.region])
        assert probe(engine, local, pool_of(receiver)) is None
        engine.destroy()
        assert (receiver.pool[:POOL_BYTES] == 7).all()
        assert np.count_nonzero(receiver.pool[POOL_BYTES:] != 7) > PATTERN_BYTES // 2

    def test_probe_of_unregistered_memory_fails(self, receiver: Receiver) -> None:
        pool = Pool(ROW, 4096, POOL_BYTES, "host", probe_address=4096, probe_bytes=PROBE_BYTES)
        engine = SendEngine(receiver.session, [])
        assert probe(engine, torch.zeros(PROBE_BYTES, dtype=torch.uint8), pool) == "a write of 16 bytes failed"
        engine.destroy()

    def test_probe_fails_if_other_bytes_are_read_back(
        self, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The transport reports success, but copies nothing."""
        engine = SendEngine(receiver.session, [receiver.region])
        monkeypatch.setattr(engine, "submit", lambda *_: WriteId(1))
        monkeypatch.setattr(engine, "poll", lambda _: WriteState.DONE)
        monkeypatch.setattr(engine, "read", lambda *_: True)
        local = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
        assert probe(engine, local, pool_of(receiver)) == "the bytes read back differ from the bytes written"
        engine.destroy()

    @pytest.mark.parametrize("stopped", [True, False], ids=["this process is stopped", "the write does not end"])
    def test_timeout_does_not_count_time_in_which_this_process_was_stopped(
        self, stopped: bool, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After the stop, Mooncake needs a moment to notice that the write has ended."""

        class Clock:
            stopped_s = 0.0

            def monotonic(self) -> float:
                return time.monotonic() + self.stopped_s

            def sleep(self, seconds: float) -> None:
                self.stopped_s += 0.0 if stopped else 100 * seconds
                time.sleep(seconds)

        clock, polls = Clock(), 0

        def poll(write: WriteId) -> WriteState:
            nonlocal polls
            polls += 1
            if stopped and polls == 1:
                clock.stopped_s = 5 * TIMEOUT_S
            return SendEngine.poll(engine, write) if stopped and polls > 3 else WriteState.PENDING

        engine = SendEngine(receiver.session, [receiver.region])
        monkeypatch.setattr(engine, "poll", poll)
        for module in ("transfer.data.probe", "common.stuck"):
            monkeypatch.setattr(f"pdserve.{module}.time", clock)
        problem = probe(engine, torch.zeros(PROBE_BYTES, dtype=torch.uint8), pool_of(receiver))
        assert problem == (None if stopped else "a write of 16 bytes did not end within 2 s")
        assert polls > 3
        engine.destroy()

    def test_peer_without_probe_memory_is_not_probed(self, receiver: Receiver) -> None:
        """For example, an older version of the server."""
        engine = SendEngine(receiver.session, [receiver.region])
        local = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
        assert probe(engine, local, Pool(ROW, receiver.base_address, POOL_BYTES)) is None
        assert not engine._connected
        engine.destroy()


@dataclass
class Routed:
    """A sender of random bytes, with its results and the routes that it chose."""

    sender: PeerSender
    pools: PoolPair
    source: torch.Tensor
    results: "queue.SimpleQueue[SendResult]"
    routes: "queue.SimpleQueue[tuple[Transport, dict[Transport, str]]]"

    def send(self) -> SendResult:
        runs = CopyRuns(*(np.array([value]) for value in (0, 0, POOL_BYTES)))
        self.sender.submit(SendJob(TransferKey(1, 1), runs, self.pools, self.results.put))
        return self.results.get(timeout=10)


@pytest.fixture
def start() -> Iterator[Callable[..., Routed]]:
    started: list[PeerSender] = []

    def start(pool: Pool, *routes: KvRoute) -> Routed:
        source = torch.randint(1, 256, (POOL_BYTES + PROBE_BYTES,), dtype=torch.uint8)
        results: queue.SimpleQueue[SendResult] = queue.SimpleQueue()
        taken: queue.SimpleQueue[tuple[Transport, dict[Transport, str]]] = queue.SimpleQueue()
        pools = PoolPair(Region(source.data_ptr(), len(source)), pool, source[POOL_BYTES:])
        sender = PeerSender(
            routes,
            [pools],
            window=4,
            on_routed=lambda transport, dropped: taken.put((transport, dict(dropped))),
        )
        started.append(sender)
        return Routed(sender, pools, source, results, taken)

    yield start
    for sender in started:
        sender.close()


def test_unavailable_transport_is_replaced_by_the_next(
    receiver: Receiver, start: Callable[..., Routed], caplog: pytest.LogCaptureFixture
) -> None:
    """On a machine without an HCA. The route is chosen before the first job."""
    routed = start(pool_of(receiver), KvRoute("rdma", receiver.session), KvRoute("tcp", receiver.session))
    transport, dropped = routed.routes.get(timeout=10)
    assert (transport, list(dropped)) == ("tcp", ["rdma"])
    assert dropped["rdma"] == "this process has no engine for rdma"
    assert "goes over tcp from now on, because rdma does not work" in caplog.text
    assert "ib_gid_index" in caplog.text, "the log names no setting that may help"
    assert routed.send().ok
    assert (receiver.pool[:POOL_BYTES] == routed.source[:POOL_BYTES].numpy()).all()
    assert routed.routes.empty()


def test_dead_peer_drops_no_transport(receiver: Receiver, start: Callable[..., Routed]) -> None:
    receiver.kill()
    routed = start(pool_of(receiver), KvRoute("rdma", receiver.session), KvRoute("tcp", receiver.session))
    result = routed.send()
    assert not result.ok
    assert "refuses connections" in result.reason
    assert routed.sender._routed.transport == "rdma"
    assert routed.routes.empty()


@dataclass
class Engines:
    """Fake engines of two transports, both of which can be opened."""

    refuse: set[Transport] = field(default_factory=set)
    fail: set[Transport] = field(default_factory=set)
    probe_fails: set[Transport] = field(default_factory=set)
    gone: bool = False
    written: list[Transport] = field(default_factory=list)

    def open(self, _session: str, _targets: object, *, transport: Transport, **_options: object) -> "StubEngine":
        return StubEngine(self, transport)

    def describe(self, session: str, _timeout_s: float) -> None:
        if self.gone:
            raise PeerUnreachableError(f"{session} is gone")

    def probe(self, engine: "StubEngine", *_: object) -> str | None:
        return "no" if engine.transport in self.probe_fails else None


@dataclass
class StubEngine:
    engines: Engines
    transport: Transport

    def submit(self, *_: int) -> WriteId | None:
        self.engines.written.append(self.transport)
        return None if self.transport in self.engines.refuse else WriteId(1)

    def poll(self, _write: WriteId) -> WriteState:
        return WriteState.FAILED if self.transport in self.engines.fail else WriteState.DONE

    def destroy(self) -> None: ...


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines()
    monkeypatch.setattr(routed_engine, "SendEngine", made.open)
    monkeypatch.setattr(routed_engine, "describe_engine", made.describe)
    monkeypatch.setattr(routed_engine, "probe", made.probe)
    return made


ROUTES = (KvRoute("nvlink", "127.0.0.1:2"), KvRoute("tcp", "127.0.0.1:1"))
POOL = Pool(ROW, 1 << 20, POOL_BYTES)


@pytest.mark.parametrize("how", ["refuse", "fail"])
def test_failed_transport_is_not_used_again(engines: Engines, start: Callable[..., Routed], how: str) -> None:
    routed = start(POOL, *ROUTES)
    assert routed.send().ok
    assert routed.routes.get(timeout=5) == ("nvlink", {})
    getattr(engines, how).add("nvlink")
    failed = routed.send()
    assert not failed.ok, "a sender does not repeat a failed job"
    assert routed.send().ok
    assert engines.written == ["nvlink", "nvlink", "tcp"]
    assert routed.routes.get(timeout=5) == ("tcp", {"nvlink": failed.reason})


def test_failed_write_to_a_dead_peer_drops_no_transport(engines: Engines, start: Callable[..., Routed]) -> None:
    engines.refuse, engines.gone = {"nvlink"}, True
    routed = start(POOL, *ROUTES)
    assert not routed.send().ok
    engines.refuse, engines.gone = set(), False
    assert routed.send().ok
    assert engines.written == ["nvlink", "nvlink"]


def test_failed_probe_selects_the_next_transport_before_any_write(
    engines: Engines, start: Callable[..., Routed]
) -> None:
    engines.probe_fails = {"nvlink"}
    routed = start(POOL, *ROUTES)
    transport, dropped = routed.routes.get(timeout=5)
    assert (transport, dropped) == ("tcp", {"nvlink": "decode 127.0.0.1:2 cannot be written to: no"})
    assert routed.send().ok
    assert engines.written == ["tcp"]


def test_only_transport_is_kept_and_reports_the_problem(engines: Engines, start: Callable[..., Routed]) -> None:
    engines.probe_fails = {"nvlink"}
    routed = start(POOL, ROUTES[0])
    result = routed.send()
    assert (result.ok, result.reason) == (False, "decode 127.0.0.1:2 cannot be written to: no")
    engines.probe_fails.clear()
    assert routed.send().ok
