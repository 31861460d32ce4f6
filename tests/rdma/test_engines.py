"""Mooncake engines of two processes over RDMA (SoftRoCE), in the virtual machine of `make test-rdma`. Without torch."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pdserve.common.errors import StartupError
from pdserve.transfer.mooncake.engine import ReceiveEngine, SendEngine, WriteId, WriteState
from pdserve.transfer.mooncake.rdma_engine import RdmaEngine
from pdserve.transfer.mooncake.sockets import PeerUnreachableError, Region
from tests.rdma.receiver import HOST, Receiver

pytestmark = pytest.mark.skipif(not HOST, reason="needs an RDMA device: make test-rdma")

POOL_BYTES = 4 << 20
WRITE_TIMEOUT_S = 30.0
"""The machine is emulated."""

source = np.random.default_rng(0).integers(1, 256, 1 << 20, dtype=np.uint8)
OURS = Region(source.ctypes.data, source.nbytes)


INFINIBAND = Path("/sys/class/infiniband")
ADD_DEVICE = """
ip link add dummy1 type dummy && ip addr add 10.7.0.1/24 dev dummy1 && ip link set dummy1 up
rdma link add rxe1 type rxe netdev dummy1
"""


def ipv4_gid(device: str) -> int:
    gids = INFINIBAND / device / "ports/1/gids"
    return next(index for index in range(16) if ":ffff:" in (gids / str(index)).read_text(encoding="ascii"))


def open_sender(receiver: Receiver, rdma: RdmaEngine) -> SendEngine:
    return SendEngine(receiver.session, [receiver.region], transport="rdma", rdma=rdma, sources=[OURS])


def wait_for(engine: SendEngine, write: WriteId | None) -> WriteState:
    assert write is not None
    deadline = time.monotonic() + WRITE_TIMEOUT_S
    while (state := engine.poll(write)) is WriteState.PENDING:
        assert time.monotonic() < deadline, "the write did not end"
        time.sleep(0.001)
    return state


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver(POOL_BYTES) as process:
        yield process


@pytest.fixture(scope="module")
def rdma() -> RdmaEngine:
    return RdmaEngine(HOST, devices=("rxe0",))


@pytest.fixture(scope="module")
def sender(receiver: Receiver, rdma: RdmaEngine) -> Iterator[SendEngine]:
    engine = open_sender(receiver, rdma)
    yield engine
    engine.destroy()


def test_a_write_changes_only_its_bytes(receiver: Receiver, sender: SendEngine) -> None:
    receiver.pool[:] = 0
    write = sender.submit(OURS.addr + 5, receiver.region.addr + 1001, 700_001)
    assert wait_for(sender, write) is WriteState.DONE
    assert (receiver.pool[1001 : 1001 + 700_001] == source[5 : 5 + 700_001]).all()
    assert not receiver.pool[:1001].any()
    assert not receiver.pool[1001 + 700_001 :].any()


def test_a_read_returns_the_bytes_of_the_peer(receiver: Receiver, sender: SendEngine) -> None:
    receiver.pool[100:200] = np.arange(100, dtype=np.uint8)
    before = source[:100].copy()
    assert sender.read(OURS.addr, receiver.region.addr + 100, 100)
    assert (source[:100] == np.arange(100)).all()
    source[:100] = before


def test_a_write_outside_the_registered_memory_fails(receiver: Receiver, sender: SendEngine) -> None:
    receiver.pool[:] = 0
    outside = sender.submit(OURS.addr, receiver.region.addr + POOL_BYTES - 100, 4096)
    assert outside is None or wait_for(sender, outside) is WriteState.FAILED
    assert not receiver.pool[:-100].any()


def test_a_write_from_memory_that_is_not_registered_fails(receiver: Receiver, sender: SendEngine) -> None:
    receiver.pool[:] = 0
    foreign = np.ones(4096, dtype=np.uint8)
    write = sender.submit(foreign.ctypes.data, receiver.region.addr, foreign.nbytes)
    assert write is None or wait_for(sender, write) is WriteState.FAILED
    assert not receiver.pool.any()


def test_an_engine_works_on_after_refused_writes(receiver: Receiver, sender: SendEngine) -> None:
    write = sender.submit(OURS.addr, receiver.region.addr, 4096)
    assert wait_for(sender, write) is WriteState.DONE
    assert (receiver.pool[:4096] == source[:4096]).all()


def test_opening_detects_memory_that_the_peer_has_not_registered(receiver: Receiver, rdma: RdmaEngine) -> None:
    with pytest.raises(PeerUnreachableError, match="has not registered the memory"):
        SendEngine(receiver.session, [Region(receiver.region.addr + POOL_BYTES, 1)], transport="rdma", rdma=rdma)


def test_an_engine_without_its_device_is_refused() -> None:
    with pytest.raises(StartupError, match="could not start an engine for rdma with rxe9"):
        ReceiveEngine(HOST, transport="rdma", devices=("rxe9",))


def test_a_set_gid_index_works(rdma: RdmaEngine) -> None:
    with Receiver(POOL_BYTES, gid_index=ipv4_gid("rxe0")) as process:
        engine = open_sender(process, rdma)
        assert wait_for(engine, engine.submit(OURS.addr, process.region.addr, 4096)) is WriteState.DONE
        engine.destroy()


@pytest.mark.parametrize("devices", [("rxe1",), ("rxe0", "rxe1")], ids=" and ".join)
def test_other_devices_carry_writes(devices: tuple[str, ...]) -> None:
    if not (INFINIBAND / "rxe1").exists():
        subprocess.run(ADD_DEVICE, shell=True, check=True)
    with Receiver(POOL_BYTES, devices=devices) as process:
        engine = open_sender(process, RdmaEngine(HOST, devices=devices))
        assert wait_for(engine, engine.submit(OURS.addr, process.region.addr, 100_000)) is WriteState.DONE
        assert (process.pool[:100_000] == source[:100_000]).all()
        engine.destroy()
