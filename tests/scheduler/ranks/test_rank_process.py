"""A rank process. The test acts as its leader."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from pdserve.configs.schema import PrefillConfig
from pdserve.scheduler.messages.ranks import RankAlive, RankFailed, RankReport, SentRow, SentStep
from pdserve.scheduler.messages.step import StepRow
from pdserve.scheduler.ranks.main import LEADER_SILENCE_S
from pdserve.scheduler.ranks.process import RankProcess
from tests.checkpoints import make_checkpoint
from tests.cluster.servers import python_path
from tests.ports import free_port


class LeaderSocket:
    """The leader's socket to its ranks."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._decoder: msgspec.msgpack.Decoder[RankReport] = msgspec.msgpack.Decoder(RankReport)

    def report(self) -> RankReport:
        assert self._socket.poll(60_000), "the rank is silent"
        _, payload = self._socket.recv_multipart()
        return self._decoder.decode(payload)

    def tell(self, payload: bytes) -> None:
        self._socket.send_multipart((b"rank-1", payload))

    def hang_up(self) -> None:
        self._socket.close(linger=0)


@contextmanager
def rank_process(model: Path) -> Iterator[tuple[RankProcess, LeaderSocket]]:
    """Rank 1 of two. Rank 0 does not start, so rank 1 waits for it in the rendezvous; it reads commands meanwhile."""
    config = PrefillConfig(model=str(model), tp=2, device="cpu", threads=1)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        meet_at = "127.0.0.1", free_port()
        process = RankProcess(config, 1, leader=f"tcp://127.0.0.1:{port}", meet_at=meet_at, keys=None)
        try:
            yield process, LeaderSocket(socket)
        finally:
            process.kill()
            process.let_go()
            process.wait()


def test_step_with_unknown_pages_is_reported_to_the_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step extends a page table that the rank does not have."""
    command = SentStep(7, (SentRow(StepRow([1], 0, []), 3, 2, [5]),), ())
    monkeypatch.setenv("PYTHONPATH", python_path())
    with rank_process(make_checkpoint(tmp_path, "llama")) as (process, leader):
        assert leader.report() == RankAlive(1)
        leader.tell(msgspec.msgpack.encode(command))
        while isinstance(report := leader.report(), RankAlive):
            pass
        assert isinstance(report, RankFailed)
        assert (report.rank, report.startup) == (1, False)
        assert report.reason == (
            "the link to the leader failed: UnknownPagesError: "
            "step 7 extends table 3 of 2 pages; this rank has 0 of them"
        )
        assert process.wait(10) == 1


def test_rank_exits_when_its_connection_to_the_leader_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """At once, without a reconnect: messages in flight are lost, and the rank would wait for them."""
    monkeypatch.setenv("PYTHONPATH", python_path())
    with rank_process(make_checkpoint(tmp_path, "llama")) as (process, leader):
        assert leader.report() == RankAlive(1)
        leader.hang_up()
        assert process.wait(LEADER_SILENCE_S / 2) == 1
    assert "rank 1 exits: the connection to the leader was closed" in capfd.readouterr().err
