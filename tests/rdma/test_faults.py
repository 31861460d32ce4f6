"""What happens to writes over RDMA when the peer or the port fails, in the virtual machine of `make test-rdma`. Without
torch.
"""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pdserve.transfer.mooncake.engine import WriteState
from pdserve.transfer.mooncake.rdma_engine import RdmaEngine
from pdserve.transfer.mooncake.sockets import PeerUnreachableError, Region
from tests.rdma.figures import report
from tests.rdma.peer import WRITE_BYTES, Peer, undisturbed, wait_until_used_again
from tests.rdma.receiver import HOST, Receiver, SendingProcess

pytestmark = pytest.mark.skipif(not HOST, reason="needs an RDMA device: make test-rdma")

WRITES = 100
POOL_BYTES = WRITES * WRITE_BYTES
CONTACT_S = 4.0
"""A peer that answers no handshake may delay others by so much. Without limits in our code it would be a minute."""
DESTROY_S = 3.0
TOLD_S = 3.0
ATTEMPTS = 5
"""The machine may run a process too late, so that writes have ended before a fault."""
ENGINES = 50
FLAPS = 10
GROWTH_KIB = 4096

source = np.random.default_rng(0).integers(1, 256, POOL_BYTES, dtype=np.uint8)
OURS = Region(source.ctypes.data, source.nbytes)


def connect(receiver: Receiver, rdma: RdmaEngine) -> Peer:
    return Peer(receiver.session, receiver.region, rdma, OURS)


def write_all(peer: Peer, receiver: Receiver) -> None:
    """All its bytes; afterwards they are 0 again."""
    assert set(peer.ends([peer.submit(index) for index in range(WRITES)])) == {WriteState.DONE}
    receiver.pool[:] = 0


def set_port(state: str) -> None:
    subprocess.run(["ip", "link", "set", "eth0", state], check=True)


@pytest.fixture(scope="module")
def rdma() -> RdmaEngine:
    engine = RdmaEngine(HOST, devices=("rxe0",))
    engine.hold(OURS)
    return engine


@pytest.fixture(scope="module")
def other(rdma: RdmaEngine) -> Iterator[Peer]:
    """A second peer, which nothing happens to."""
    with Receiver(POOL_BYTES) as process:
        yield connect(process, rdma)


@pytest.mark.parametrize("_turn", range(int(os.environ.get("PDSERVE_RDMA_KILLS", "1"))))
def test_writes_to_a_killed_receiver_end_when_their_engine_is_destroyed(
    rdma: RdmaEngine, other: Peer, _turn: int
) -> None:
    assert any(kill_while_writing(rdma, other) for _ in range(ATTEMPTS)), "the fault always came too late"


def kill_while_writing(rdma: RdmaEngine, other: Peer) -> int:
    """Returns how many writes were pending when the receiver was dead."""
    with Receiver(POOL_BYTES) as process:
        peer = connect(process, rdma)
        assert peer.writes()
        with undisturbed(other, "receiver killed", same=lambda: write_all(peer, process)):
            writes = [peer.submit(index) for index in range(WRITES)]
            process.kill()
            killed = time.monotonic()
            pending = peer.ends(writes, timeout_s=1.0).count(WriteState.PENDING)
            peer.destroy()
            ended_s = time.monotonic() - killed
            with pytest.raises(PeerUnreachableError, match="refuses connections"):
                connect(process, rdma)
        print(f"{pending} of {WRITES} writes were pending a second later")
        report("receiver killed: all writes to it have ended", ended_s, TOLD_S)
        assert ended_s < TOLD_S
        return pending


def test_a_peer_that_comes_back_as_a_new_process_is_written_to(rdma: RdmaEngine) -> None:
    with Receiver(POOL_BYTES) as process:
        peer = connect(process, rdma)
        assert peer.writes()
        process.kill()
        peer.destroy()
    with Receiver(POOL_BYTES) as process:
        again = connect(process, rdma)
        assert again.writes(1)
        assert (process.pool[WRITE_BYTES : 2 * WRITE_BYTES] == source[WRITE_BYTES : 2 * WRITE_BYTES]).all()
        assert not process.pool[:WRITE_BYTES].any()
        again.destroy()


def test_nothing_lands_after_a_sender_is_killed_and_others_still_reach_the_receiver(
    rdma: RdmaEngine, other: Peer
) -> None:
    with Receiver(POOL_BYTES) as process:
        sender = SendingProcess(process)
        sender.wait()
        with undisturbed(other, "sender killed"):
            sender.kill()
            time.sleep(0.2)
            process.pool[:] = 0
            time.sleep(1)
        assert not process.pool.any()
        peer = connect(process, rdma)
        assert peer.writes()
        assert (process.pool[:WRITE_BYTES] == source[:WRITE_BYTES]).all()
        peer.destroy()


def test_no_byte_lands_after_an_engine_is_destroyed(rdma: RdmaEngine, other: Peer) -> None:
    with Receiver(POOL_BYTES) as process:
        peer = connect(process, rdma)
        assert peer.writes()
        with undisturbed(other, "engine destroyed during writes", CONTACT_S, lambda: write_all(peer, process)):
            for index in range(WRITES):
                peer.submit(index)
            peer.destroy()
            landed = process.pool.copy()
            np.invert(source, out=source)  # has a new owner
            time.sleep(1)
        assert (process.pool == landed).all()
        again = connect(process, rdma)
        assert again.writes(WRITES - 1)
        assert (process.pool[-WRITE_BYTES:] == source[-WRITE_BYTES:]).all()
        again.destroy()


def test_a_receiver_that_stops_before_the_handshake_delays_others_by_seconds_only(
    rdma: RdmaEngine, other: Peer
) -> None:
    with Receiver(POOL_BYTES) as process:
        peer = connect(process, rdma)
        process.stop()
        with undisturbed(other, "receiver stopped before the handshake", CONTACT_S):
            assert not peer.writes(timeout_s=1.0)
            peer.destroy()
        process.resume()


def test_a_receiver_that_stops_in_mid_transfer_takes_its_writes(rdma: RdmaEngine, other: Peer) -> None:
    with Receiver(POOL_BYTES) as process:
        peer = connect(process, rdma)
        assert peer.writes()
        with undisturbed(other, "receiver stopped during writes", same=lambda: write_all(peer, process)):
            writes = [peer.submit(index) for index in range(WRITES)]
            process.stop()
            assert set(peer.ends(writes)) == {WriteState.DONE}, "the HCA of the peer needs no process"
            with pytest.raises(PeerUnreachableError, match="does not answer"):
                connect(process, rdma)
        assert (process.pool == source).all()
        process.resume()
        peer.destroy()


class Held:
    """What this process holds: descriptors, threads, RDMA resources, and KiB of memory."""

    def __init__(self) -> None:
        shown = subprocess.run(["rdma", "resource", "show"], capture_output=True, text=True, check=True).stdout
        own = Path("/proc/self")
        self.counts = {name: len(list((own / name).iterdir())) for name in ("fd", "task")}
        for name, count in re.findall(r"(pd|cq|qp|mr|ctx) (\d+)", shown):  # of each device
            self.counts[name] = self.counts.get(name, 0) + int(count)
        (size,) = re.findall(r"VmRSS:\s+(\d+) kB", (own / "status").read_text(encoding="ascii"))
        self.memory_kib = int(size)

    def check_no_more_than(self, before: "Held") -> None:
        print(f"{before.counts}, {before.memory_kib} KiB -> {self.counts}, {self.memory_kib} KiB")
        assert all(count <= before.counts[name] for name, count in self.counts.items())
        assert self.memory_kib < before.memory_kib + GROWTH_KIB


def test_engines_leave_nothing_behind(rdma: RdmaEngine) -> None:
    with Receiver(POOL_BYTES) as process:
        for turn in range(ENGINES):
            peer = connect(process, rdma)
            assert peer.writes()
            peer.destroy()
            if turn == ENGINES // 10:
                before = Held()
        Held().check_no_more_than(before)


@pytest.mark.parametrize("down_s", [2, 60])
def test_a_port_that_was_down_is_used_again(rdma: RdmaEngine, other: Peer, down_s: int) -> None:
    """By engines that were idle when it went down, and by new ones. Writes of the time before end without landing."""
    with Receiver(POOL_BYTES) as process:
        peer = connect(process, rdma)
        assert peer.writes()
        for index in range(1, WRITES):
            peer.submit(index)
        set_port("down")
        down = time.monotonic()
        time.sleep(1)
        assert peer.destroy() < DESTROY_S
        landed = process.pool.copy()
        time.sleep(max(0.0, down + down_s - time.monotonic()))
        set_port("up")
        wait_until_used_again(other, partial(connect, process, rdma), f"port down for {down_s} s")
        assert (process.pool == landed).all()


def test_a_port_that_goes_down_ten_times_is_used_again_and_nothing_is_left_behind(
    rdma: RdmaEngine, other: Peer
) -> None:
    with Receiver(POOL_BYTES) as process:
        assert other.writes()
        peer = connect(process, rdma)
        assert peer.writes()
        peer.destroy()
        before = Held()
        for _ in range(FLAPS):
            peer = connect(process, rdma)
            for index in range(WRITES):
                peer.submit(index)
            set_port("down")
            time.sleep(2)
            assert peer.destroy() < DESTROY_S
            set_port("up")
            time.sleep(1)
        wait_until_used_again(other, partial(connect, process, rdma), f"port down {FLAPS} times")
        Held().check_no_more_than(before)
