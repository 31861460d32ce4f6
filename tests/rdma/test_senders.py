"""A sender and its routes over real RDMA, in the virtual machine of `make test-rdma`."""

import os
import queue
import subprocess
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pdserve.memory.kv_pool import PROBE_BYTES
from pdserve.transfer.data.routed_engine import PoolPair
from pdserve.transfer.data.sender import PeerSender, SendJob, SendResult
from pdserve.transfer.mooncake.library import Transport
from pdserve.transfer.mooncake.sockets import Region
from pdserve.transfer.mooncake.transports import KvRoute, LocalTransport, open_rdma
from pdserve.transfer.plan.copy_runs import CopyRuns
from pdserve.transfer.protocol.layout import KvLayout, Plane
from pdserve.transfer.protocol.messages import Pool, TransferKey
from tests.rdma.figures import report
from tests.rdma.receiver import HOST, Receiver

pytestmark = pytest.mark.skipif(not HOST, reason="needs an RDMA device: make test-rdma")

POOL_BYTES = 4 << 20
PARTS = 64
TOLD_S = 3.0
MORE_S = 3.0
BACK_S = 60.0
ATTEMPTS = 5
"""The machine may kill the receiver too late."""

source = torch.randint(1, 256, (POOL_BYTES + PROBE_BYTES,), dtype=torch.uint8)
OURS = Region(source.data_ptr(), len(source))


@pytest.fixture(scope="module")
def local() -> LocalTransport:
    return open_rdma(LocalTransport("auto", HOST, ("rxe0",)), [OURS])


class Sender:
    """A sender to a receiver with an engine for RDMA and one for TCP."""

    def __init__(self, receiver: Receiver, local: LocalTransport) -> None:
        layout = KvLayout((Plane("k", 1),), 0, 1, 0, 1, 1, POOL_BYTES, "uint8")
        address = receiver.region.addr
        pool = Pool(layout, address, POOL_BYTES, probe_address=address + POOL_BYTES, probe_bytes=PROBE_BYTES)
        self.pools = PoolPair(OURS, pool, source[POOL_BYTES:])
        self.results: queue.SimpleQueue[SendResult] = queue.SimpleQueue()
        self.routes: queue.SimpleQueue[tuple[Transport, dict[Transport, str]]] = queue.SimpleQueue()
        self.sender = PeerSender(
            [KvRoute("rdma", receiver.sessions["rdma"]), KvRoute("tcp", receiver.sessions["tcp"])],
            [self.pools],
            window=PARTS,
            on_routed=lambda transport, dropped: self.routes.put((transport, dict(dropped))),
            local=local,
        )

    def submit(self) -> None:
        starts = np.arange(0, POOL_BYTES, POOL_BYTES // PARTS)
        sizes = np.full(PARTS, POOL_BYTES // PARTS)
        self.sender.submit(SendJob(TransferKey(1, 1), CopyRuns(starts, starts, sizes), self.pools, self.results.put))

    def send(self) -> tuple[SendResult, float]:
        started = time.monotonic()
        self.submit()
        return self.results.get(timeout=60), time.monotonic() - started


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver(POOL_BYTES + PROBE_BYTES, transports=("rdma", "tcp")) as process:
        yield process


def test_all_bytes_of_a_job_arrive_over_rdma(receiver: Receiver, local: LocalTransport) -> None:
    peer = Sender(receiver, local)
    assert peer.routes.get(timeout=60) == ("rdma", {})
    assert peer.send()[0].ok
    assert (receiver.pool[:POOL_BYTES] == source[:POOL_BYTES].numpy()).all()
    peer.sender.close()


@pytest.mark.parametrize("_turn", range(int(os.environ.get("PDSERVE_RDMA_KILLS", "1"))))
def test_the_end_of_a_receiver_is_told_in_time(local: LocalTransport, _turn: int) -> None:
    assert any(kill_while_sending(local) for _ in range(ATTEMPTS)), "the fault always came too late"


def kill_while_sending(local: LocalTransport) -> bool:
    """Returns whether the receiver was killed before all bytes had arrived."""
    with Receiver(POOL_BYTES + PROBE_BYTES, transports=("rdma", "tcp")) as receiver:
        peer = Sender(receiver, local)
        assert peer.routes.get(timeout=60) == ("rdma", {})
        assert peer.send()[0].ok
        receiver.pool[:] = 0
        peer.submit()
        while not receiver.pool[:POOL_BYTES].any():
            time.sleep(0.001)
        receiver.kill()
        killed = time.monotonic()
        result = peer.results.get(timeout=60)
        told_s = time.monotonic() - killed
        print(result.reason)
        if not result.ok:
            report("receiver killed: told to the scheduler", told_s, TOLD_S)
        peer.sender.close()
        assert told_s < TOLD_S
        return not result.ok


def test_a_request_goes_another_way_while_the_port_is_down_and_rdma_comes_back(
    receiver: Receiver, local: LocalTransport
) -> None:
    peer = Sender(receiver, local)
    assert peer.routes.get(timeout=60) == ("rdma", {})
    result, undisturbed_s = peer.send()
    assert result.ok
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    down = time.monotonic()
    result, down_s = peer.send()
    assert result.ok
    assert peer.routes.get(timeout=1) == ("tcp", {"rdma": "no port is active: rxe0 is DOWN"})
    assert down_s < undisturbed_s + MORE_S
    time.sleep(max(0.0, down + 2 - time.monotonic()))
    subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)
    up = time.monotonic()
    assert peer.routes.get(timeout=BACK_S) == ("rdma", {})
    report("port down: a job over another route, more than undisturbed", down_s - undisturbed_s, MORE_S)
    report("port down for 2 s: used again by a sender", time.monotonic() - up, BACK_S)
    receiver.pool[:] = 0
    assert peer.send()[0].ok
    assert (receiver.pool[:POOL_BYTES] == source[:POOL_BYTES].numpy()).all()
    peer.sender.close()
