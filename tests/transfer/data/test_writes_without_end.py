"""Writes over RDMA that do not end, because Mooncake or the HCA does not answer. No real RDMA engine can be made to do
this: it is a stand-in.
"""

import queue
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from pdserve.transfer.data.routed_engine import PoolPair
from pdserve.transfer.data.sender import PeerSender, SendJob, SendResult
from pdserve.transfer.mooncake import engine as engine_module
from pdserve.transfer.mooncake.engine import SendEngine, WritesPendingError
from pdserve.transfer.mooncake.rdma_engine import RdmaEngine
from pdserve.transfer.mooncake.sockets import EngineDescription, Region
from pdserve.transfer.mooncake.transports import KvRoute, LocalTransport
from pdserve.transfer.plan.copy_runs import CopyRuns
from pdserve.transfer.protocol.layout import KvLayout, Plane
from pdserve.transfer.protocol.messages import Pool, TransferKey
from tests.transfer.data.kv_receiver import Receiver

POOL_BYTES = 1 << 20
SOURCE = Region(1 << 30, POOL_BYTES)


class StuckRdma:
    """An RDMA engine whose writes end only when `ends` is set."""

    def __init__(self) -> None:
        self.mooncake = self
        self.held: list[Region] = []
        self.ends = False

    def hold(self, region: Region) -> None:
        self.held.append(region)

    def release(self, region: Region) -> None:
        self.held.remove(region)

    def hang_up(self, peer: EngineDescription) -> None:
        """Has no effect."""

    def transfer_submit_write(self, *_: object) -> int:
        return 1

    def transfer_check_status(self, _: int) -> int:
        return -1 if self.ends else 0


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver(POOL_BYTES) as process:
        yield process


@pytest.fixture(autouse=True)
def _short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "ENDED_S", 0.2)


def test_an_engine_holds_its_source_memory_until_its_writes_have_ended(receiver: Receiver) -> None:
    rdma = StuckRdma()
    engine = SendEngine(
        receiver.session, [receiver.region], transport="rdma", rdma=cast(RdmaEngine, rdma), sources=[SOURCE]
    )
    assert engine.submit(SOURCE.addr, receiver.region.addr, 4096) is not None
    with pytest.raises(WritesPendingError, match=r"1 writes over RDMA to decode .* have not ended"):
        engine.destroy()
    assert rdma.held == [SOURCE]
    rdma.ends = True
    engine.destroy()
    assert rdma.held == []


def test_a_job_has_no_result_before_its_writes_have_ended_but_queued_jobs_fail(receiver: Receiver) -> None:
    rdma = StuckRdma()
    layout = KvLayout((Plane("k", 1),), 0, 1, 0, 1, 1, POOL_BYTES, "uint8")
    pools = PoolPair(SOURCE, Pool(layout, receiver.region.addr, POOL_BYTES))
    results: queue.SimpleQueue[SendResult] = queue.SimpleQueue()
    sender = PeerSender(
        [KvRoute("rdma", receiver.session)],
        [pools],
        window=1,
        local=LocalTransport("rdma", "127.0.0.1", rdma=cast(RdmaEngine, rdma)),
    )
    start = np.zeros(1, dtype=np.int64)
    jobs = [
        SendJob(TransferKey(number, 1), CopyRuns(start, start, start + 4096), pools, results.put) for number in (1, 2)
    ]
    for job in jobs:
        sender.submit(job)
    queued = results.get(timeout=30)
    assert queued.job is jobs[1]
    assert not queued.ok
    assert "have not ended" in queued.reason
    assert results.empty()
    rdma.ends = True
    stalled = results.get(timeout=30)
    assert stalled.job is jobs[0]
    assert not stalled.ok
    assert stalled.late_writes
    sender.close()
