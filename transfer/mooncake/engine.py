"""Mooncake engines in two roles: one receive engine per process and transport, and one send engine per peer.

The roles are separate because of how engines fail. A send engine whose peer hangs, restarts or overflows stays broken,
and writes that it reported as failed may still run later and read source memory that has a new owner. The remedy is to
destroy the engine and create a new one, which takes a millisecond. So each peer has its own send engine, and it
registers no memory. The receive engine exists as long as the process: its port is the published address, and its
registrations are the pools. Over RDMA all peers share an engine (`rdma_engine.py`).

Engines do not survive fork: create them in the process that uses them.
"""

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NewType

from ...common.errors import PdserveError, StartupError
from ...common.stuck import RunningTime
from ...configs.schema import can_receive_kv
from .confinement import confine, confine_if_local
from .library import TCP_LANES, MooncakeEngine, Transport, create_engine
from .rdma_engine import START_S, RdmaEngine, register
from .sockets import (
    PeerUnreachableError,
    Region,
    acked_bytes,
    addresses_of,
    cut_connections,
    describe_engine,
    drop_unsent,
    ignore_idle_connections,
    split_session,
    wake_listener,
)

log = logging.getLogger(__name__)

WriteId = NewType("WriteId", int)
"""A write in flight. After poll() has returned DONE or FAILED it is invalid and must not be used again."""

PREFLIGHT_TIMEOUT_S: Final = 1.0
FIRST_WRITE_TIMEOUT_S: Final = 1.5
GUARD_WAITS: Final = 15
"""The wait of FIRST_WRITE_TIMEOUT_S is divided into this many parts: if this process is stopped during the wait, only
one part passes meanwhile.
"""
CUT_AGAIN_S: Final = 0.2
HANG_UP_AGAIN_S: Final = 0.1
"""Mooncake may connect to the peer again, to repeat the writes that have not ended: a few times."""
CONNECTING_S: Final = 0.25
"""How long destroy() waits for connections that Mooncake is about to open."""
ENDED_S: Final = 10.0
"""How long destroy() waits for writes over RDMA. To a dead peer they end within milliseconds or, if Mooncake does not
answer, when the HCA has repeated them for some seconds.
"""
LONGEST_GAP_S: Final = 0.02
"""If two looks for connections are further apart, this process was stopped or starved, and Mooncake with it."""


class WriteState(enum.Enum):
    PENDING = enum.auto()
    DONE = enum.auto()
    """The bytes are in the peer's memory."""
    FAILED = enum.auto()
    """All or some of the bytes may still arrive, until the peer's kernel has dropped the connection."""


class WritesPendingError(PdserveError):
    """Writes to a peer do not end: Mooncake or the HCA does not answer. They may still read their source memory."""


class ReceiveEngine:
    """Lets peers write into this process's pools. `session` is the address to publish, `host` its host part.

    Mooncake does not authenticate: any client of its ports can read and write registered memory. On a loopback host the
    ports are confined to this machine; otherwise use a private network. Register only pools.
    """

    def __init__(
        self,
        host: str,
        *,
        transport: Transport = "tcp",
        devices: Sequence[str] = (),
        gid_index: int | None = None,
    ) -> None:
        if not can_receive_kv(host):
            raise StartupError(
                f"peers cannot send KV to host {host!r}: set advertise_host to the IPv4 address or name of this machine"
            )
        self._engine: MooncakeEngine | None = create_engine(host, transport, devices=devices, gid_index=gid_index)
        self._port = self._engine.get_rpc_port()
        self.session = f"{host}:{self._port}"
        try:
            ignore_idle_connections(self._port)
        except OSError as error:
            log.warning("idle connections to %s will delay transfers: %s", self.session, error)
        if (problem := confine_if_local(host, self._port)) is not None:
            log.warning("the KV ports of %s stay reachable from other machines: %s", self.session, problem)

    def register(self, address: int, size_bytes: int) -> None:
        """Open [address, address + size_bytes) to writes. The caller keeps the memory alive until close()."""
        assert self._engine is not None, "register on a closed engine"
        register(self._engine, address, size_bytes)

    def describe_hcas(self) -> str:
        """The devices of an RDMA engine, for the log."""
        with contextlib.suppress(PeerUnreachableError):  # this machine is very busy
            return describe_engine(f"127.0.0.1:{self._port}", START_S).hcas()
        return "unknown devices"

    def close(self) -> None:
        """Stop receiving. Afterwards no peer writes into the registered memory. May be called twice."""
        if self._engine is not None:
            wake_listener(self._port)
            self._engine = None


class SendEngine:
    """Writes into one peer's registered memory. Not thread-safe; destroy() ends it, also with writes in flight.

    The constructor asks the peer for its registered memory and checks that it contains `targets`, the regions to write
    to. So a peer that is dead, hung or another process is detected within PREFLIGHT_TIMEOUT_S, before any write. Raises
    PeerUnreachableError, and StartupError if Mooncake cannot create the engine.

    Over RDMA, `rdma` is the engine of the process, and `sources` the source memory of the writes. Other transports need
    neither.
    """

    def __init__(
        self,
        session: str,
        targets: Sequence[Region],
        *,
        transport: Transport = "tcp",
        rdma: RdmaEngine | None = None,
        sources: Sequence[Region] = (),
    ) -> None:
        if transport == "rdma" and rdma is None:
            raise StartupError("this process has no engine for rdma")
        self.session = session
        self._peer = description = describe_engine(session, PREFLIGHT_TIMEOUT_S)
        for target in targets:
            if not description.holds(target):
                raise PeerUnreachableError(
                    f"decode {session} has not registered the memory it announced ({target.length} bytes at "
                    f"{target.addr:#x}): it is probably a new process at the same address"
                )
        self._data_port = description.tcp_data_port if transport == "tcp" else None
        self._addresses = _addresses(session) if self._data_port else frozenset()
        self._in_flight: set[WriteId] = set()
        self._connected = False
        self._broken = False
        self._rdma = rdma
        self._held: list[Region] = []
        if rdma is not None:
            self._engine: MooncakeEngine | None = rdma.mooncake
            try:
                for region in sources:
                    rdma.hold(region)
                    self._held.append(region)
            except StartupError:
                self.destroy()
                raise
            return
        self._engine = create_engine("127.0.0.1", transport, sends=True)
        self._port = self._engine.get_rpc_port()
        if (problem := confine(self._port)) is not None:
            log.debug("listeners of a send engine stay open: %s", problem)

    def submit(self, source: int, destination: int, size_bytes: int) -> WriteId | None:
        """Start to copy from our address `source` to the peer's address `destination`; None if the peer is gone.

        Do not change the source memory until poll() returns DONE or FAILED, or destroy() has returned.
        """
        assert self._engine is not None, "submit on a destroyed engine"
        if self._connected:
            write = self._engine.transfer_submit_write(self.session, source, destination, size_bytes)
        else:
            # The first write does the handshake, which would wait 60 s for a peer that hangs since the pre-flight.
            with self._guarded():
                write = self._engine.transfer_submit_write(self.session, source, destination, size_bytes)
            self._connected = True
        if write == 0:
            return None
        self._in_flight.add(WriteId(write))
        return WriteId(write)

    def read(self, destination: int, source: int, size_bytes: int) -> bool:
        """Copy from the peer's address `source` to ours and wait for it, for seconds if the peer hangs. Returns whether
        it succeeded. Call only after a successful write.
        """
        assert self._engine is not None, "read on a destroyed engine"
        with self._guarded() if self._rdma is not None else contextlib.nullcontext():
            return self._engine.transfer_sync_read(self.session, destination, source, size_bytes) == 0

    def poll(self, write: WriteId) -> WriteState:
        """The state of a write. Does not block."""
        assert self._engine is not None, "poll on a destroyed engine"
        assert write in self._in_flight, (
            "poll of a write that has already ended"
        )  # would be a use after free in Mooncake
        status = self._engine.transfer_check_status(write)
        if status == 0:
            return WriteState.PENDING
        self._in_flight.remove(write)
        self._broken |= status != 1
        return WriteState.DONE if status == 1 else WriteState.FAILED

    def delivered_bytes(self) -> int | None:
        """Bytes that the peer's kernel has received so far, also of writes that have not ended; None if unknown, as
        for transports without TCP connections. Takes about a millisecond.
        """
        return acked_bytes(self._addresses, self._data_port) if self._data_port else None

    def destroy(self) -> None:
        """End all writes. Afterwards no source memory is read and no more bytes leave this machine; bytes in the
        network or in the peer's kernel may still arrive.

        Takes milliseconds, also with writes in flight to a hung peer; up to CONNECTING_S if such writes cannot connect.
        Over RDMA it returns when every write has reported an end. Raises WritesPendingError if one has not after
        ENDED_S: call it again, and keep the source memory as it is until it returns. May be called twice.
        """
        if self._engine is None:
            return
        if self._rdma is not None:
            self._end_rdma_writes(self._rdma)
            for region in self._held:
                self._rdma.release(region)
        else:
            if self._data_port:
                self._drop_unsent(self._data_port)
            wake_listener(self._port)
        self._engine = None
        self._in_flight.clear()

    def _end_rdma_writes(self, rdma: RdmaEngine) -> None:
        hang_up: Callable[[], None] = partial(rdma.hang_up, self._peer)
        started = time.monotonic()
        while pending := self._count_pending():
            if time.monotonic() > started + ENDED_S:
                raise WritesPendingError(
                    f"{pending} writes over RDMA to decode {self.session} have not ended for {ENDED_S:g} s"
                )
            hang_up()
            hung_up = time.monotonic()
            while self._count_pending() and time.monotonic() < hung_up + HANG_UP_AGAIN_S:
                time.sleep(0.001)
            hang_up = self._cut  # the rest may wait for a handshake

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """End what blocks inside of Mooncake after FIRST_WRITE_TIMEOUT_S."""
        ended = threading.Event()
        guard = (ended, self._cut)
        threading.Thread(target=_cut_late_handshake, args=guard, name=f"guard-{self.session}", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _cut(self) -> None:
        """End handshakes with the peer and, over RDMA, its connections."""
        with contextlib.suppress(OSError):  # the host name cannot be resolved at the moment
            cut_connections(self.session)
        if self._rdma is not None:
            self._rdma.hang_up(self._peer)

    def _drop_unsent(self, data_port: int) -> None:
        """Make all connections drop their unsent bytes, also those that Mooncake is still opening: it would still fill
        them before it closes them in its destructor. No thread of ours runs during the destructor, so wait here until
        these connections exist. No more are opened once every write in flight has a connection, all lanes are open, or
        a write has failed (peer gone).
        """
        waited = RunningTime(LONGEST_GAP_S)
        while drop_unsent(data_port) < min(TCP_LANES, self._count_pending()):
            if self._broken or waited.read() >= CONNECTING_S:
                return
            time.sleep(0.001)

    def _count_pending(self) -> int:
        return sum(self.poll(write) is WriteState.PENDING for write in list(self._in_flight))


def _cut_late_handshake(ended: threading.Event, cut: Callable[[], None]) -> None:
    """Cut a handshake that exceeds FIRST_WRITE_TIMEOUT_S. Repeats until it has ended: if this process was stopped or
    starved, the connection may not exist yet at the first timeout.
    """
    if any(ended.wait(FIRST_WRITE_TIMEOUT_S / GUARD_WAITS) for _ in range(GUARD_WAITS)):
        return
    while True:
        cut()
        if ended.wait(CUT_AGAIN_S):
            return


def _addresses(session: str) -> frozenset[str]:
    try:
        return frozenset(addresses_of(split_session(session)[0]))
    except OSError as error:
        raise PeerUnreachableError(f"decode {session} cannot be reached: {error}") from error
