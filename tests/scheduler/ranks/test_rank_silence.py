"""Detection of lost ranks and leaders. After a process was stopped itself, it does not count its peers as silent."""

import io
import json
import socket
import threading
import time
from types import SimpleNamespace
from typing import NoReturn, cast
from unittest.mock import Mock

import msgspec
import pytest
import zmq

from pdserve.common.stuck import Watch
from pdserve.common.words import OUT_OF_MEMORY
from pdserve.configs.schema import PrefillConfig
from pdserve.models.layers.parallel import listen, reserve
from pdserve.models.loading.catalog import ModelSource
from pdserve.scheduler.messages.ranks import CacheChecked, RankAlive, RankFailed, RankReport
from pdserve.scheduler.ranks import group as ranks
from pdserve.scheduler.ranks import main as rank_main
from pdserve.scheduler.ranks.group import Ranks
from pdserve.scheduler.ranks.main import ALIVE_INTERVAL_S, CONSEQUENCE_S, LEADER_SILENCE_S, LeaderLink
from pdserve.scheduler.ranks.page_mover import PageMover
from pdserve.scheduler.ranks.rank import RankEngine
from pdserve.scheduler.ranks.transfers.rank_transfers import PrefillTransfers
from pdserve.transfer.control.curve import ClusterKeys
from tests.cluster.servers import wait_until

SILENCE_S = 0.5


def test_ranks_are_not_lost_when_the_hub_itself_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of that time are still unread. A rank that stays silent afterwards is lost."""
    monkeypatch.setattr(ranks, "TICK_S", SILENCE_S / 10)
    monkeypatch.setattr(ranks, "STARTUP_SILENCE_S", SILENCE_S)
    monkeypatch.setattr(ranks, "SILENCE_S", SILENCE_S)
    failures: list[RankFailed] = []

    def on_report(report: RankReport) -> None:
        if isinstance(report, RankFailed):
            failures.append(report)
        else:
            time.sleep(3 * SILENCE_S)  # on the hub's thread

    keys = ClusterKeys.random()
    hub = ranks._Hub(PrefillConfig(tp=2), ("127.0.0.1", 1), keys, on_report)
    with zmq.Context() as context, context.socket(zmq.DEALER) as rank:
        rank.setsockopt(zmq.LINGER, 0)
        rank.setsockopt(zmq.ROUTING_ID, b"rank-1")
        keys.secure_client(rank)
        rank.connect(hub.address)
        rank.send(msgspec.msgpack.encode(CacheChecked(1, None)))
        ends_at = time.monotonic() + 5 * SILENCE_S
        while time.monotonic() < ends_at:
            if rank.poll(50):  # the hub runs again
                rank.recv()
                rank.send(msgspec.msgpack.encode(RankAlive(1)))
        assert not failures
        wait_until(lambda: bool(failures), 10, "the silent rank is lost")
    hub.close()
    assert failures[0].rank == 1
    assert "has sent nothing" in failures[0].reason


@pytest.mark.parametrize("stopped_in", ["sleep", "report", None])
def test_rank_does_not_exit_when_it_was_stopped_itself(stopped_in: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped while it slept, or while it sent its heartbeat. Silence of the leader ends it."""
    stopped_s = 3 * LEADER_SILENCE_S

    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds + (stopped_s if stopped_in == "sleep" else 0.0)

    class EndedError(Exception):
        """The end of the process, or of the test."""

    def leave(status: int) -> NoReturn:
        raise EndedError(f"status {status}")

    sent: list[RankReport] = []

    def report(message: RankReport) -> None:
        sent.append(message)
        clock.now += stopped_s if stopped_in == "report" else 0.0
        if len(sent) > 1.5 * LEADER_SILENCE_S / ALIVE_INTERVAL_S or (stopped_in and len(sent) > 1):
            raise EndedError("test")

    clock = Clock()
    monkeypatch.setattr(rank_main, "time", clock)
    monkeypatch.setattr(rank_main, "os", SimpleNamespace(_exit=leave))
    link = cast(LeaderLink, SimpleNamespace(engine=None, report=report, heard_at=clock.now))
    with pytest.raises(EndedError, match="test" if stopped_in else "status 1"):
        rank_main._send_heartbeats(link, 1)


@pytest.mark.parametrize("stopped_s", [60.0, 0.0])
def test_sender_is_not_reported_as_stuck_if_the_rank_was_stopped_during_the_check(stopped_s: float) -> None:
    now = 100.0

    def problems() -> list[str]:
        nonlocal now
        now += stopped_s
        return ["the sender is stuck"]

    engine = RankEngine.__new__(RankEngine)
    engine._rank, engine._arrivals, engine._command = 0, None, None
    engine._mover = cast(PageMover, SimpleNamespace(busy_since=None))
    engine._writes, engine._watch = None, Watch(lambda: now)
    while now < 110.0:
        assert engine.problems() == ()
        now += ALIVE_INTERVAL_S
    engine._writes = cast(PrefillTransfers, SimpleNamespace(writer=SimpleNamespace(problems=problems)))
    assert engine.problems() == (() if stopped_s else ("the sender is stuck",))


def test_exit_of_another_rank_is_reported_before_its_consequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader notices the exit of a rank after one tick; a rank that loses its connection waits longer."""

    class OtherProcess:
        """Rank 1 has been killed; rank 0 is still running."""

        pid = 4711

        def __init__(self, _config: object, rank: int, **_: object) -> None:
            self.rank = rank

        def wait(self, _timeout_s: float | None = None) -> int:
            return -9 if self.rank == 1 or ended.wait(10) else 0

    ended = threading.Event()
    monkeypatch.setattr(ranks, "RankProcess", OtherProcess)
    reports: list[RankReport] = []
    all_ranks = Ranks(PrefillConfig(tp=2), cast(ModelSource, None), None, reports.append)
    wait_until(lambda: bool(reports), 10, "the exit is reported")
    ended.set()
    all_ranks.close()
    assert reports[0] == RankFailed(1, f"rank 1 (process 4711) exited with status -9{OUT_OF_MEMORY}")
    assert CONSEQUENCE_S >= 2 * ranks.TICK_S

    class EndedError(Exception):
        """The end of the process."""

    def lose_connection(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("Connection reset by peer")

    def leave(status: int) -> NoReturn:
        raise EndedError(f"status {status}")

    introduction = {
        "config": {"role": "prefill", "tp": 2},
        "rank": 0,
        "leader": "tcp://",
        "meet_at": ["127.0.0.1", 1],
        "key_seeds": None,
    }
    stdin = SimpleNamespace(buffer=io.BytesIO(json.dumps(introduction).encode()))
    events: list[object] = []
    monkeypatch.setattr(rank_main, "sys", SimpleNamespace(stdin=stdin))
    monkeypatch.setattr(rank_main, "time", SimpleNamespace(sleep=events.append, monotonic=time.monotonic))
    monkeypatch.setattr(rank_main, "threading", Mock())
    monkeypatch.setattr(rank_main, "signal", Mock())
    monkeypatch.setattr(rank_main, "configure_logging", Mock())
    monkeypatch.setattr(rank_main, "locate_model", Mock())
    monkeypatch.setattr(rank_main, "LeaderLink", lambda *_: SimpleNamespace(report=events.append))
    monkeypatch.setattr(rank_main, "RankEngine", lose_connection)
    monkeypatch.setattr(rank_main, "_exit", leave)
    with pytest.raises(EndedError, match="status 1"):
        rank_main.main()
    assert events == [CONSEQUENCE_S, RankFailed(0, "RuntimeError: Connection reset by peer")]


def test_reserved_port_is_free_for_rank_0_alone() -> None:
    with reserve("127.0.0.1", 0) as reserved:
        address = reserved.getsockname()
        with pytest.raises(OSError, match="in use"):
            socket.create_server(address)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        with listen(*address), socket.create_connection(address, timeout=5):
            pass
