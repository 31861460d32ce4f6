"""Processes that receive and send over RDMA, in the virtual machine. Tests stop and kill them.

The pool of a receiver is shared memory, so the test sees every byte that is written to it, also while the process
is stopped or dead.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pdserve.transfer.mooncake.library import Transport
from pdserve.transfer.mooncake.sockets import Region

HOST = os.environ.get("PDSERVE_RDMA", "")
"""The address of the machine for TCP; empty where there is no RDMA."""
START_TIMEOUT_S = 120
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["pdserve.transfer.mooncake.engine"])


class Receiver:
    """`pool` is the memory of the process, `sessions` (by transport) and `region` are what it publishes."""

    def __init__(
        self,
        size_bytes: int,
        *,
        transports: Sequence[Transport] = ("rdma",),
        devices: Sequence[str] = ("rxe0",),
        gid_index: int | None = None,
    ) -> None:
        self._file = Path(f"/dev/shm/receiver-{os.getpid()}-{id(self)}")
        with self._file.open("wb") as file:
            file.truncate(size_bytes)
        self.pool: NDArray[np.uint8] = np.memmap(self._file, dtype=np.uint8, mode="r+")
        self._ours, theirs = _processes.Pipe()
        self.process = _processes.Process(
            target=_receive, args=(str(self._file), transports, devices, gid_index, theirs)
        )
        self.process.start()
        theirs.close()

    def wait(self) -> None:
        """Wait until the engines are there; afterwards `sessions` and `region` can be read."""
        assert self._ours.poll(START_TIMEOUT_S), "the receiver did not start"
        sessions, address = self._ours.recv()
        self.sessions: dict[Transport, str] = sessions
        self.region = Region(address, self.pool.nbytes)

    @property
    def session(self) -> str:
        return self.sessions["rdma"]

    def stop(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Self:
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._ours.close()
        self._file.unlink()


class SendingProcess:
    """A process that writes to a receiver until it is killed."""

    def __init__(self, receiver: Receiver) -> None:
        self._ours, theirs = _processes.Pipe()
        arguments = (receiver.session, receiver.region.addr, receiver.region.length, theirs)
        self.process = _processes.Process(target=_send, args=arguments)
        self.process.start()
        theirs.close()

    def wait(self) -> None:
        """Wait until it has begun to write."""
        assert self._ours.poll(START_TIMEOUT_S), "the sender did not start"
        self._ours.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._ours.close()


def _send(session: str, address: int, size_bytes: int, answer: Connection) -> None:
    from pdserve.transfer.mooncake.rdma_engine import RdmaEngine
    from tests.rdma.peer import WRITE_BYTES, Peer

    source = np.ones(size_bytes, dtype=np.uint8)
    region = Region(source.ctypes.data, size_bytes)
    peer = Peer(session, Region(address, size_bytes), RdmaEngine(HOST, devices=("rxe0",)), region)
    assert peer.writes()
    answer.send(True)
    while True:
        peer.ends([peer.submit(index) for index in range(size_bytes // WRITE_BYTES)])


def _receive(
    file: str, transports: Sequence[Transport], devices: Sequence[str], gid_index: int | None, answer: Connection
) -> None:
    from pdserve.transfer.mooncake.engine import ReceiveEngine

    pool = np.memmap(file, dtype=np.uint8, mode="r+")
    engines = {
        transport: ReceiveEngine(HOST, transport=transport, devices=devices, gid_index=gid_index)
        for transport in transports
    }
    for engine in engines.values():
        engine.register(pool.ctypes.data, pool.nbytes)
    answer.send(({transport: engine.session for transport, engine in engines.items()}, pool.ctypes.data))
    try:
        answer.recv()
    except EOFError:
        sys.exit()
