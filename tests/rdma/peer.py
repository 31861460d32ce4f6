"""Writing to a peer over RDMA, and what the other threads and peers of the process notice meanwhile."""

import functools
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from pdserve.transfer.mooncake.engine import SendEngine, WriteId, WriteState
from pdserve.transfer.mooncake.rdma_engine import RdmaEngine
from pdserve.transfer.mooncake.sockets import PeerUnreachableError, Region
from tests.rdma.figures import report

WRITE_BYTES: Final = 64 << 10
TICK_S: Final = 0.01
MORE_S: Final = 0.5
STEADY_S: Final = 2.0
BACK_S: Final = 60.0
_SENT: Final = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts")


class Peer:
    """Writes parts of our memory to the same parts of a receiver's."""

    def __init__(self, session: str, region: Region, rdma: RdmaEngine, ours: Region) -> None:
        self.engine = SendEngine(session, [region], transport="rdma", rdma=rdma, sources=[ours])
        self._ours, self._theirs = ours.addr, region.addr

    def submit(self, index: int = 0) -> WriteId | None:
        """Write part `index`, of WRITE_BYTES."""
        start = index * WRITE_BYTES
        return self.engine.submit(self._ours + start, self._theirs + start, WRITE_BYTES)

    def ends(self, writes: Sequence[WriteId | None], timeout_s: float = 30.0) -> list[WriteState]:
        """How these writes ended; those that did not are PENDING."""
        states = [WriteState.FAILED if write is None else WriteState.PENDING for write in writes]
        deadline = time.monotonic() + timeout_s
        while WriteState.PENDING in states and time.monotonic() < deadline:
            for index, write in enumerate(writes):
                if write is not None and states[index] is WriteState.PENDING:
                    states[index] = self.engine.poll(write)
            time.sleep(0.001)
        return states

    def writes(self, index: int = 0, timeout_s: float = 30.0) -> bool:
        """Whether a write of this part succeeds in time."""
        return self.ends([self.submit(index)], timeout_s) == [WriteState.DONE]

    def destroy(self) -> float:
        """End the engine. Returns how long that took."""
        started = time.monotonic()
        self.engine.destroy()
        return time.monotonic() - started


class Bystander:
    """A process that measures its own pauses: those of the whole machine, which is emulated on a host with other work.
    Ends with this process.
    """

    def __init__(self) -> None:
        self._ours, theirs = multiprocessing.get_context("forkserver").Pipe()
        arguments = (theirs,)
        multiprocessing.get_context("forkserver").Process(target=_measure_pauses, args=arguments, daemon=True).start()
        theirs.close()
        self.longest_pause_s()

    def longest_pause_s(self) -> float:
        """Since the last call."""
        self._ours.send(None)
        return float(self._ours.recv())


def _measure_pauses(asked: Connection) -> None:
    longest_s = 0.0
    last = time.monotonic()
    while True:
        time.sleep(TICK_S)
        now = time.monotonic()
        longest_s, last = max(longest_s, now - last), now
        if asked.poll():
            asked.recv()
            asked.send(longest_s)
            longest_s = 0.0


bystander = functools.cache(Bystander)


class Watch:
    """The longest pause of another Python thread, and of writes to another peer, one after the other. `machine_s` is
    the longest pause of the whole machine meanwhile.
    """

    def __init__(self, other: Peer) -> None:
        self.pause_s = self.write_s = self.machine_s = 0.0
        self.failed = 0
        self._stop = threading.Event()
        self._other = other
        self._threads = [threading.Thread(target=run) for run in (self._tick, self._write)]

    def _tick(self) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            time.sleep(TICK_S)
            now = time.monotonic()
            self.pause_s, last = max(self.pause_s, now - last), now

    def _write(self) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            self.failed += not self._other.writes()
            self.write_s = max(self.write_s, time.monotonic() - started)

    def __enter__(self) -> "Watch":
        bystander().longest_pause_s()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.machine_s = bystander().longest_pause_s()


@contextmanager
def undisturbed(
    other: Peer, fault: str, contact_s: float = MORE_S, same: Callable[[], object] | None = None
) -> Iterator[None]:
    """Other threads of this process do not notice the fault inside, and writes to the other peer are delayed by at
    most `contact_s`. The machine is emulated: times are compared with those of an undisturbed run of the same minute,
    and with the pauses of another process. `same` does what is done inside without the fault: writes to one peer
    delay those to another.
    """
    assert other.writes()
    with Watch(other) as before:
        if same is not None:
            same()
        time.sleep(STEADY_S)
    with Watch(other) as during:
        yield
    print(
        f"pause {before.pause_s:.2f} -> {during.pause_s:.2f} s, write {before.write_s:.2f} -> {during.write_s:.2f} s, "
        f"the whole machine {before.machine_s:.2f} -> {during.machine_s:.2f} s"
    )
    pause_s = during.pause_s - max(before.pause_s, during.machine_s)
    write_s = during.write_s - before.write_s - during.machine_s
    report(f"{fault}: longest pause of another thread, more than undisturbed", pause_s, MORE_S)
    report(f"{fault}: longest write to another peer, more than undisturbed", write_s, contact_s)
    assert pause_s < MORE_S
    assert write_s < contact_s
    assert during.failed == 0


def sent_packets() -> int:
    """Packets that the device has sent."""
    return int(_SENT.read_text(encoding="ascii"))


def wait_until_used_again(old: Peer, connect: Callable[[], Peer], fault: str) -> None:
    """Wait until an engine that exists and a new one write over RDMA again, which the device counts."""
    up = time.monotonic()
    waiting = ["old", "new"]
    while waiting:
        assert time.monotonic() < up + BACK_S, f"not used again by {' and '.join(waiting)} engines"
        for name in list(waiting):
            before = sent_packets()
            try:
                peer = old if name == "old" else connect()
            except PeerUnreachableError:
                continue
            if peer.writes(timeout_s=2.0):
                assert sent_packets() > before
                waiting.remove(name)
                report(f"{fault}: used again by {name} engines", time.monotonic() - up, BACK_S)
            if name == "new":
                peer.destroy()
        time.sleep(1)
