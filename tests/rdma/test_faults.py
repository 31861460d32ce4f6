"""What happens to writes over RDMA when the peer or the port fails, in the virtual machine of `make test-rdma`. Without
torch. The machine is emulated: times are compared with those of an undisturbed run of the same minute.
"""

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pdserve.transfer.mooncake.engine import SendEngine, WriteId, WriteState
from pdserve.transfer.mooncake.rdma_engine import RdmaEngine
from pdserve.transfer.mooncake.sockets import PeerUnreachableError, Region
from tests.rdma.receiver import HOST, Receiver

pytestmark = pytest.mark.skipif(not HOST, reason="needs an RDMA device: make test-rdma")

WRITE_BYTES = 64 << 10
WRITES = 100
POOL_BYTES = WRITES * WRITE_BYTES
MORE_S = 0.5
CONTACT_S = 4.0
"""A peer that answers no handshake may delay others by so much. Without limits in our code it would be a minute."""
DESTROY_S = 3.0
BACK_S = 60.0
STEADY_S = 2.0

source = np.random.default_rng(0).integers(1, 256, POOL_BYTES, dtype=np.uint8)
OURS = Region(source.ctypes.data, source.nbytes)


class Peer:
    """The engine that writes to a receiver."""

    def __init__(self, receiver: Receiver, rdma: RdmaEngine) -> None:
        self.engine = SendEngine(receiver.session, [receiver.region], transport="rdma", rdma=rdma, sources=[OURS])
        self._address = receiver.region.addr

    def submit(self, index: int = 0) -> WriteId | None:
        """Write one of WRITES parts."""
        start = index * WRITE_BYTES
        return self.engine.submit(OURS.addr + start, self._address + start, WRITE_BYTES)

    def writes(self, index: int = 0, timeout_s: float = 30.0) -> bool:
        """Whether a write of this part succeeds in time."""
        write = self.submit(index)
        deadline = time.monotonic() + timeout_s
        state = WriteState.FAILED if write is None else WriteState.PENDING
        while write is not None and state is WriteState.PENDING and time.monotonic() < deadline:
            time.sleep(0.001)
            state = self.engine.poll(write)
        return state is WriteState.DONE

    def destroy(self) -> float:
        """End the engine. Returns how long that took."""
        started = time.monotonic()
        self.engine.destroy()
        return time.monotonic() - started


@pytest.fixture(scope="module")
def rdma() -> RdmaEngine:
    engine = RdmaEngine(HOST, devices=("rxe0",))
    engine.hold(OURS)
    return engine


@pytest.fixture(scope="module")
def other(rdma: RdmaEngine) -> Iterator[Peer]:
    """A second peer, which nothing happens to."""
    with Receiver(POOL_BYTES) as process:
        yield Peer(process, rdma)


class Watch:
    """The longest pause of another Python thread, and of writes to another peer, one after the other."""

    def __init__(self, other: Peer) -> None:
        self.pause_s = self.write_s = 0.0
        self.failed = 0
        self._stop = threading.Event()
        self._other = other
        self._threads = [threading.Thread(target=run) for run in (self._tick, self._write)]

    def _tick(self) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            time.sleep(0.01)
            now = time.monotonic()
            self.pause_s, last = max(self.pause_s, now - last), now

    def _write(self) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            self.failed += not self._other.writes()
            self.write_s = max(self.write_s, time.monotonic() - started)

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def undisturbed(other: Peer, contact_s: float = MORE_S) -> Iterator[None]:
    """Other threads of this process do not notice what happens inside, and writes to the other peer are delayed by at
    most `contact_s`.
    """
    assert other.writes()
    with Watch(other) as before:
        time.sleep(STEADY_S)
    with Watch(other) as during:
        yield
    print(f"pause {before.pause_s:.2f} -> {during.pause_s:.2f} s, write {before.write_s:.2f} -> {during.write_s:.2f} s")
    assert during.pause_s < before.pause_s + MORE_S
    assert during.write_s < before.write_s + contact_s
    assert during.failed == 0


@pytest.mark.parametrize("_turn", range(int(os.environ.get("PDSERVE_RDMA_KILLS", "1"))))
def test_writes_to_a_killed_receiver_end_when_their_engine_is_destroyed(
    rdma: RdmaEngine, other: Peer, _turn: int
) -> None:
    with Receiver(POOL_BYTES) as process:
        peer = Peer(process, rdma)
        assert peer.writes()
        with undisturbed(other):
            writes = [peer.submit(index) for index in range(WRITES)]
            process.kill()
            time.sleep(1)
            pending = sum(write is not None and peer.engine.poll(write) is WriteState.PENDING for write in writes)
            destroy_s = peer.destroy()
            with pytest.raises(PeerUnreachableError, match="refuses connections"):
                Peer(process, rdma)
        print(f"{pending} of {WRITES} writes were pending, ended in {destroy_s:.2f} s")
        assert pending, "the fault came too late"
        assert destroy_s < DESTROY_S


def test_no_byte_lands_after_an_engine_is_destroyed(rdma: RdmaEngine, other: Peer) -> None:
    with Receiver(POOL_BYTES) as process:
        peer = Peer(process, rdma)
        assert peer.writes()
        with undisturbed(other, CONTACT_S):
            for index in range(WRITES):
                peer.submit(index)
            peer.destroy()
            landed = process.pool.copy()
            np.invert(source, out=source)  # has a new owner
            time.sleep(1)
        assert (process.pool == landed).all()
        again = Peer(process, rdma)
        assert again.writes(WRITES - 1)
        assert (process.pool[-WRITE_BYTES:] == source[-WRITE_BYTES:]).all()
        again.destroy()


def test_a_receiver_that_stops_before_the_handshake_delays_others_by_seconds_only(
    rdma: RdmaEngine, other: Peer
) -> None:
    with Receiver(POOL_BYTES) as process:
        peer = Peer(process, rdma)
        process.stop()
        with undisturbed(other, CONTACT_S):
            assert not peer.writes(timeout_s=1.0)
            peer.destroy()
        process.resume()


def test_a_receiver_that_stops_later_takes_its_writes(rdma: RdmaEngine, other: Peer) -> None:
    with Receiver(POOL_BYTES) as process:
        peer = Peer(process, rdma)
        assert peer.writes()
        process.stop()
        with undisturbed(other):
            assert peer.writes(1), "the HCA of the peer needs no process"
            with pytest.raises(PeerUnreachableError, match="does not answer"):
                Peer(process, rdma)
        assert (process.pool[WRITE_BYTES : 2 * WRITE_BYTES] == source[WRITE_BYTES : 2 * WRITE_BYTES]).all()
        process.resume()
        peer.destroy()


def test_engines_leave_nothing_behind(rdma: RdmaEngine) -> None:
    def held() -> tuple[int, int, str]:
        resources = subprocess.run(["rdma", "resource", "show"], capture_output=True, text=True, check=True).stdout
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), resources

    with Receiver(POOL_BYTES) as process:
        counts = []
        for _ in range(50):
            peer = Peer(process, rdma)
            assert peer.writes()
            peer.destroy()
            counts.append(held())
        assert counts[-1] == counts[5]


@pytest.mark.parametrize("down_s", [2, 60])
def test_a_port_that_was_down_is_used_again(rdma: RdmaEngine, other: Peer, down_s: int) -> None:
    """By engines that were idle when it went down, and by new ones. Writes of the time before end without landing."""
    with Receiver(POOL_BYTES) as process:
        peer = Peer(process, rdma)
        assert peer.writes()
        for index in range(1, WRITES):
            peer.submit(index)
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        down = time.monotonic()
        time.sleep(1)
        assert peer.destroy() < DESTROY_S
        landed = process.pool.copy()
        time.sleep(max(0.0, down + down_s - time.monotonic()))
        subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)
        up = time.monotonic()
        waiting = {"idle", "new"}
        while waiting and time.monotonic() < up + BACK_S:
            if "idle" in waiting and other.writes(timeout_s=2.0):
                waiting.remove("idle")
                print(f"idle: {time.monotonic() - up:.1f} s after the port was up again")
            if "new" in waiting:
                new = Peer(process, rdma)
                if new.writes(timeout_s=2.0):
                    waiting.remove("new")
                    print(f"new: {time.monotonic() - up:.1f} s after the port was up again")
                new.destroy()
            time.sleep(1)
        assert not waiting
        assert (process.pool == landed).all()
