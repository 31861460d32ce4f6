"""The leader's socket to its rank processes. The test acts as these processes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from pdserve.configs.schema import PrefillConfig
from pdserve.scheduler.messages.ranks import (
    CacheChecked,
    RankCommand,
    RankFailed,
    RankReport,
    RunStep,
    SentStep,
    StopRank,
)
from pdserve.scheduler.messages.step import StepRow
from pdserve.scheduler.ranks.group import RankGroup, _Hub
from pdserve.transfer.control.curve import ClusterKeys
from pdserve.transfer.data.chunks import PartScatter, PartWrite
from pdserve.transfer.protocol.messages import HeadSlice, InstanceId, StagePart, TransferKey
from tests.cluster.servers import wait_until
from tests.transfer.control.zmtp_peer import ZmtpPeer

KEYS = ClusterKeys.random()


class Hub:
    """A hub for two rank processes, and its reports."""

    def __init__(self) -> None:
        self.reports: list[RankReport] = []
        self._changed = threading.Condition()
        self.hub = _Hub(PrefillConfig(tp=3), ("127.0.0.1", 1), KEYS, self._take)

    def _take(self, report: RankReport) -> None:
        with self._changed:
            self.reports.append(report)
            self._changed.notify_all()

    def wait(self, count: int) -> list[RankReport]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.reports) >= count, 10), self.reports
        return self.reports

    def close(self) -> None:
        closing = threading.Thread(target=self.hub.close, daemon=True)
        closing.start()
        closing.join(5)
        assert not closing.is_alive(), "close() hangs"


Connect = Callable[[Hub, bytes], "zmq.Socket[bytes]"]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens sockets like those of ranks, with a given identity."""
    with ExitStack() as stack:
        context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())

        def open_socket(hub: Hub, identity: bytes) -> "zmq.Socket[bytes]":
            socket = stack.enter_context(context.socket(zmq.DEALER))
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.ROUTING_ID, identity)
            KEYS.secure_client(socket)
            socket.connect(hub.hub.address)
            return socket

        yield open_socket


def test_invalid_report_fails_the_rank_and_the_hub_can_be_closed(connect: Connect) -> None:
    hub = Hub()
    connect(hub, b"rank-2").send(b"nonsense")
    (failed,) = hub.wait(1)
    assert isinstance(failed, RankFailed)
    assert failed.rank == 2
    assert "the link to rank 2 failed" in failed.reason
    hub.close()


def test_failed_hub_reports_its_error_and_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_silence(_: _Hub) -> None:
        raise RuntimeError("the clock has stopped")

    monkeypatch.setattr(_Hub, "_check_silence", check_silence)
    hub = Hub()
    (failed,) = hub.wait(1)
    assert failed == RankFailed(0, "the link to the ranks failed: RuntimeError: the clock has stopped")
    hub.close()


def test_connections_without_the_key_are_refused_and_cost_no_memory() -> None:
    hub = Hub()
    port = int(hub.hub.address.rpartition(":")[2])
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.ROUTING_ID, b"rank-1")
        stranger.connect(hub.hub.address)
        stranger.send(msgspec.msgpack.encode(RankFailed(1, "not mine to say")))
        with ZmtpPeer(port, mechanism="CURVE") as unfinished:
            assert unfinished.send_frame_until_cut(64 << 20) < 64 << 20
    assert hub.reports == []
    hub.close()


def test_too_many_connections_without_the_key_close_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.transfer.control.unknown_peers.MAX_UNKNOWN_PEERS", 4)
    monkeypatch.setattr("pdserve.transfer.control.unknown_peers.CUTS_PER_CALL", 3)
    hub = Hub()
    port = int(hub.hub.address.rpartition(":")[2])
    with ExitStack() as stack:
        peers = [stack.enter_context(ZmtpPeer(port, mechanism="CURVE")) for _ in range(20)]
        wait_until(lambda: all(peer.cut() for peer in peers[:16]), 10, "the oldest are closed")
        assert not any(peer.cut() for peer in peers[16:])
    hub.close()


def test_messages_that_are_not_reports_are_ignored(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    hub = Hub()
    stranger = connect(hub, b"rank-3")
    stranger.send(b"nonsense")
    stranger.send(msgspec.msgpack.encode(RankFailed(1, "not mine to say")))
    wait_until(lambda: "ignoring a message of b'rank-3'" in caplog.text, 10, "the message of the stranger is logged")
    rank = connect(hub, b"rank-1")
    rank.send_multipart([b"two", b"frames"])
    rank.send(msgspec.msgpack.encode(CacheChecked(1, None)))
    assert hub.wait(1) == [CacheChecked(1, None)]
    assert caplog.text.count("ignoring a message of b'rank-3'") == 1
    hub.hub.tell(StopRank(), None)
    while (command := rank.recv()) != msgspec.msgpack.encode(StopRank()):
        assert b"LeaderAlive" in command
    assert not stranger.poll(100)
    hub.close()


def test_steps_of_data_parallel_ranks_reach_only_their_rank(connect: Connect) -> None:
    """Each rank has page tables of its own: rank 2 gets a page list from its beginning."""
    hub = Hub()
    pages = [4, 5, 6]
    row = StepRow((1,), 0, pages)
    sockets = {number: connect(hub, b"rank-%d" % number) for number in (1, 2)}
    for number, socket in sockets.items():
        socket.send(msgspec.msgpack.encode(CacheChecked(number, None)))
    hub.wait(2)
    ranks: Any = SimpleNamespace(tell=lambda command, to: hub.hub.tell(command, to))
    for number in (1, 2):
        RankGroup(ranks, [number]).tell(RunStep(number, (row,)))
    for number, socket in sockets.items():
        step = next_step(socket)
        assert (step.command_id, step.rows[0].kept, step.rows[0].new_pages) == (number, 0, pages)
    RankGroup(ranks, [0, 1]).tell(StopRank())
    while (command := sockets[1].recv()) != msgspec.msgpack.encode(StopRank()):
        assert b"LeaderAlive" in command
    while sockets[2].poll(100):
        assert b"LeaderAlive" in sockets[2].recv()
    hub.close()


@pytest.mark.parametrize("dp_rank", [0, 1])
def test_staged_parts_go_to_the_rank_of_their_scheduler(dp_rank: int) -> None:
    """Peers count the stages of a data-parallel rank from 0."""
    sent: list[tuple[int, ...]] = []
    ranks: Any = SimpleNamespace(tell=lambda _, to: sent.append(to))
    group = RankGroup(ranks, [dp_rank, 2 + dp_rank])
    for stage in range(2):
        part = StagePart(5, TransferKey(1, 1), stage, stage, HeadSlice(0, 1, 0, 1), 0, 4)
        group.tell(PartScatter(part, 0, 64, [0], 0))
        group.tell(PartWrite(InstanceId("decode"), part, 0, 64, [0], 0))
    assert sent == [(dp_rank,), (dp_rank,), (2 + dp_rank,), (2 + dp_rank,)]


def next_step(socket: "zmq.Socket[bytes]") -> SentStep:
    decoder: msgspec.msgpack.Decoder[RankCommand] = msgspec.msgpack.Decoder(RankCommand)
    while not isinstance(command := decoder.decode(socket.recv()), SentStep):
        pass
    return command
