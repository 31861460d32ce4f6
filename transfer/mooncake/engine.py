"""Mooncake engines in their two roles: one that receives, per process, and one that sends, per peer.

The roles are apart because of how engines fail. A send engine whose peer hangs, restarts or overflows stays broken,
and writes it reported as failed may still run later, reading source memory that has a new owner by then. The cure for
all of it is to destroy that engine and make a new one, which takes a millisecond; so each peer has its own, and it
registers nothing, except over RDMA, where the source memory has to be registered too. The receive engine's port is the
published address and its registrations are the pools: it lives as long as the process.

Engines do not survive fork: create them in the process that uses them.
"""

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Sequence
from typing import Final, NewType

from ...configs.errors import StartupError
from ...configs.schema import LOOPBACK_HOSTS, can_receive_kv
from .library import TCP_LANES, MooncakeEngine, Transport, create_engine
from .sockets import (
    PeerUnreachableError,
    Region,
    acked_bytes,
    addresses_of,
    confine_to_loopback,
    cut_connections,
    describe_engine,
    drop_unsent,
    ignore_idle_connections,
    split_session,
    wake_listener,
)

log = logging.getLogger(__name__)

WriteId = NewType("WriteId", int)
"""A write in flight. A linear value: once poll() has said DONE or FAILED it is gone and must not be used again."""

PREFLIGHT_TIMEOUT_S: Final = 1.0
FIRST_WRITE_TIMEOUT_S: Final = 1.5
CUT_AGAIN_S: Final = 0.2
CONNECTING_S: Final = 0.25
"""How long destroy() waits for connections that Mooncake is about to open."""


class WriteState(enum.Enum):
    PENDING = enum.auto()
    DONE = enum.auto()
    """The bytes are in the peer's memory."""
    FAILED = enum.auto()
    """The bytes may still arrive, in part or in full, until the peer's kernel has dropped the connection."""


class ReceiveEngine:
    """Lets peers write into this process's pools. `session` is the address to publish, `host` how peers reach us.

    Mooncake does not authenticate: whoever reaches its ports may read and write what is registered. On a loopback host
    the ports are confined to this machine; elsewhere they belong on a private network. Register pools, nothing else.
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
        self.confined = False
        try:
            ignore_idle_connections(self._port)
        except OSError as error:
            log.warning("idle connections to %s will delay transfers: %s", self.session, error)
        if _is_loopback(host):
            try:
                _confine(self._port)
                self.confined = True
            except (OSError, PeerUnreachableError) as error:
                log.warning("the KV ports of %s stay reachable from other machines: %s", self.session, error)

    def register(self, address: int, size_bytes: int) -> None:
        """Open [address, address + size_bytes) to writes. The caller keeps the memory alive until close()."""
        assert self._engine is not None, "register on a closed engine"
        _register(self._engine, address, size_bytes)

    def close(self) -> None:
        """Stop receiving. Afterwards nobody writes the registered memory. May be called twice."""
        if self._engine is not None:
            wake_listener(self._port)
            self._engine = None


class SendEngine:
    """Writes into one peer's registered memory. Not thread-safe; destroy() ends it, whatever is in flight.

    Opening it asks the peer for a sign of life and for the `targets`, the regions that the writes will go to, so that a
    peer that is dead, hung or another process than expected is noticed within PREFLIGHT_TIMEOUT_S and before anything
    is written.
    Raises PeerUnreachableError, and StartupError where Mooncake cannot make such an engine.

    Over RDMA, `sources` is the memory that writes are read from, and `host` how the peer reaches us: it calls back to
    learn our HCA's address. Over other transports nothing is registered and no peer calls a sender back.
    """

    def __init__(
        self,
        session: str,
        targets: Sequence[Region],
        *,
        transport: Transport = "tcp",
        host: str = "127.0.0.1",
        devices: Sequence[str] = (),
        gid_index: int | None = None,
        sources: Sequence[Region] = (),
    ) -> None:
        self.session = session
        description = describe_engine(session, PREFLIGHT_TIMEOUT_S)
        for target in targets:
            if not description.holds(target):
                raise PeerUnreachableError(
                    f"decode {session} has not registered the memory it announced ({target.length} bytes at "
                    f"{target.addr:#x}): it is probably a new process at an old address"
                )
        self._data_port = description.tcp_data_port if transport == "tcp" else None
        self._addresses = _addresses(session) if self._data_port else frozenset()
        rdma = transport == "rdma"
        self._engine: MooncakeEngine | None = create_engine(
            host if rdma else "127.0.0.1", transport, sends=True, devices=devices, gid_index=gid_index
        )
        self._port = self._engine.get_rpc_port()
        self._in_flight: set[WriteId] = set()
        self._connected = False
        self._broken = False
        if not rdma or _is_loopback(host):
            try:
                _confine(self._port)
            except (OSError, PeerUnreachableError) as error:
                log.debug("listeners of a send engine stay open: %s", error)
        if rdma:
            try:
                for region in sources:
                    _register(self._engine, region.addr, region.length)
            except StartupError:
                self.destroy()
                raise

    def submit(self, source: int, destination: int, size_bytes: int) -> WriteId | None:
        """Start copying from our address `source` to the peer's address `destination`; None when the peer is gone.

        Source memory must stay as it is until poll() is terminal or destroy() has returned.
        """
        assert self._engine is not None, "submit on a destroyed engine"
        if self._connected:
            write = self._engine.transfer_submit_write(self.session, source, destination, size_bytes)
        else:
            # The first write shakes hands, and would wait 60 s for a peer that hung just after the pre-flight.
            submitted = threading.Event()
            guard = (submitted, self.session)
            threading.Thread(target=_cut_late_handshake, args=guard, name=f"guard-{self.session}", daemon=True).start()
            try:
                write = self._engine.transfer_submit_write(self.session, source, destination, size_bytes)
            finally:
                submitted.set()
            self._connected = True
        if write == 0:
            return None
        self._in_flight.add(WriteId(write))
        return WriteId(write)

    def read(self, destination: int, source: int, size_bytes: int) -> bool:
        """Copy from the peer's address `source` to ours, and wait for it: for seconds where the peer hangs. Whether it
        worked. Only after a write has.
        """
        assert self._engine is not None, "read on a destroyed engine"
        return self._engine.transfer_sync_read(self.session, destination, source, size_bytes) == 0

    def poll(self, write: WriteId) -> WriteState:
        """Where a write stands. Does not block."""
        assert self._engine is not None, "poll on a destroyed engine"
        assert write in self._in_flight, "poll of a write that has already ended"  # their side: use after free
        status = self._engine.transfer_check_status(write)
        if status == 0:
            return WriteState.PENDING
        self._in_flight.remove(write)
        self._broken |= status != 1
        return WriteState.DONE if status == 1 else WriteState.FAILED

    def delivered_bytes(self) -> int | None:
        """What the peer's kernel has received so far, of writes that may not have ended; None where nobody knows, as
        over transports without connections. Takes about a millisecond.
        """
        return acked_bytes(self._addresses, self._data_port) if self._data_port else None

    def destroy(self) -> None:
        """End all writes. Afterwards no source memory is read any more, and nothing more leaves this machine; what has
        left it, or is in the peer's kernel, may still arrive.

        Takes milliseconds, also with writes in flight to a hung peer; up to CONNECTING_S where such writes cannot be
        connected. May be called twice.
        """
        if self._engine is not None:
            if self._data_port:
                self._drop_unsent(self._data_port)
            wake_listener(self._port)
            self._engine = None
            self._in_flight.clear()

    def _drop_unsent(self, data_port: int) -> None:
        """Drop it on all connections, also on those that Mooncake opens only now: it would fill them, and close them in
        its destructor like the others. While that runs no thread of ours does, so they have to be there before. Once
        every write in flight has its connection, or all lanes are there, none is opened any more; nor is one where a
        write has failed, which means that the peer has gone.
        """
        deadline = time.monotonic() + CONNECTING_S
        while drop_unsent(data_port) < min(TCP_LANES, self._count_pending()):
            if self._broken or time.monotonic() >= deadline:
                return
            time.sleep(0.001)

    def _count_pending(self) -> int:
        return sum(self.poll(write) is WriteState.PENDING for write in list(self._in_flight))


def _cut_late_handshake(submitted: threading.Event, session: str) -> None:
    """End a handshake whose time is up. Again until it has ended: if this process was stopped or starved meanwhile, it
    has yet to connect when the time is up first.
    """
    wait_s = FIRST_WRITE_TIMEOUT_S
    while not submitted.wait(wait_s):
        with contextlib.suppress(OSError):  # the name of the host cannot be resolved just now
            cut_connections(session)
        wait_s = CUT_AGAIN_S


def _register(engine: MooncakeEngine, address: int, size_bytes: int) -> None:
    status = engine.register_memory(address, size_bytes)
    if status != 0:
        reason = "it overlaps a registered region" if status == -7 else f"status {status}"
        raise StartupError(f"Mooncake cannot register {size_bytes} bytes at {address:#x}: {reason}")


def _addresses(session: str) -> frozenset[str]:
    try:
        return frozenset(addresses_of(split_session(session)[0]))
    except OSError as error:
        raise PeerUnreachableError(f"decode {session} cannot be reached: {error}") from error


def _is_loopback(host: str) -> bool:
    return host in LOOPBACK_HOSTS or host.startswith("127.")


def _confine(port: int) -> None:
    data_port = describe_engine(f"127.0.0.1:{port}", PREFLIGHT_TIMEOUT_S).tcp_data_port
    confine_to_loopback({port, data_port} if data_port else {port})
