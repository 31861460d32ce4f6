"""The engine with which this process writes over RDMA: one for all peers, as long as the process lives.

An RDMA engine cannot be destroyed like one of TCP: its destructor waits for work requests without an end, up to ten
seconds with the GIL held, and every engine registers the source memory again. So the engine stays, and what ends is the
connection to one peer (`hang_up`).
"""

import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import Final

from ...common.errors import StartupError
from .confinement import confine_if_local
from .library import MooncakeEngine, create_engine
from .sockets import (
    EngineDescription,
    PeerUnreachableError,
    Region,
    describe_engine,
    end_rdma_connection,
    ignore_idle_connections,
)

log = logging.getLogger(__name__)

START_S: Final = 10.0
"""How long our own engine may take to answer at its start, on a busy machine."""
_ANSWER_S: Final = 1.0
"""How long it may take later."""


class RdmaEngine:
    """An engine with source memory for all peers. `host` is the address at which peers reach us: they connect back to
    get the addresses of our HCAs. On a loopback host only this machine can connect: they could write into the
    registered memory. May be used by several threads. Raises StartupError.
    """

    def __init__(self, host: str, *, devices: Sequence[str] = (), gid_index: int | None = None) -> None:
        self.mooncake: MooncakeEngine = create_engine(host, "rdma", sends=True, devices=devices, gid_index=gid_index)
        self._session = f"127.0.0.1:{self.mooncake.get_rpc_port()}"
        self._lock = threading.Lock()
        self._users: dict[Region, int] = {}
        with contextlib.suppress(OSError):
            ignore_idle_connections(self.mooncake.get_rpc_port())
        try:
            self._description = describe_engine(self._session, START_S)
        except PeerUnreachableError as error:
            raise StartupError(f"the RDMA engine of this process does not answer: {error}") from error
        if (problem := confine_if_local(host, self.mooncake.get_rpc_port())) is not None:
            log.warning("the RDMA port of %s stays reachable from other machines: %s", self._session, problem)

    def hold(self, region: Region) -> None:
        """Register source memory, unless it is. The caller keeps it alive until release(). Raises StartupError."""
        with self._lock:
            if region not in self._users:
                register(self.mooncake, region.addr, region.length)
            self._users[region] = self._users.get(region, 0) + 1

    def release(self, region: Region) -> None:
        """The registration ends when no one holds it any more. No write may be in flight from it."""
        with self._lock:
            self._users[region] -= 1
            if not self._users[region]:
                del self._users[region]
                self.mooncake.unregister_memory(region.addr)

    def hang_up(self, peer: EngineDescription) -> None:
        """End the connections to a peer. All writes to it report an end within milliseconds, also if the peer is dead
        or cannot be reached. The next write connects again. Other peers are not affected. Does nothing if our own
        engine does not answer.

        Mooncake has no call for this. But it gives up a connection when the peer asks for one with other queue pairs,
        as it does after a restart. So we ask in its name, with a list of queue pairs that is refused.
        """
        with contextlib.suppress(PeerUnreachableError):
            for ours in self._description.devices:
                for theirs in peer.devices:
                    end_rdma_connection(
                        self._session,
                        f"{self._description.name}@{ours.name}",
                        f"{peer.name}@{theirs.name}",
                        _ANSWER_S,
                    )

    def describe(self) -> str:
        """Its devices, for the log."""
        return self._description.hcas()


def register(engine: MooncakeEngine, address: int, size_bytes: int) -> None:
    """Register memory with an engine. Raises StartupError."""
    status = engine.register_memory(address, size_bytes)
    if status != 0:
        reason = "it overlaps a registered region" if status == -7 else f"status {status}"
        raise StartupError(f"Mooncake cannot register {size_bytes} bytes at {address:#x}: {reason}")
