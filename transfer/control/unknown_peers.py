"""Limits the memory that connections of unknown peers to a ZMQ port can use.

libzmq bounds single frames (MAXMSGSIZE) and complete messages (RCVHWM). It does not bound a message with an endless
number of parts, an endless frame on each of many connections, or the number of connections. Any client that reaches the
port can send these: with a cluster key only during the handshake, without one at any time. The kernel counts the bytes
received on each connection, and libzmq treats a connection that we shut down as closed by the peer.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from ..tcp_info import NO_LINGER, borrowed_socket, tcp_counters

MAX_UNKNOWN_PEERS: Final = 512
"""Connections without an introduction; a new one closes the oldest."""
UNKNOWN_PEER_BYTES: Final = 1 << 20
"""Limit of bytes from an unknown peer. An introduction has some kilobytes."""


@dataclass(slots=True)
class _Connection:
    addresses: tuple[Any, Any]  # whatever the address family has
    known: bool = False
    message_read: bool = False
    """A complete message was read since the last check."""
    counted_from: int = 0
    """Bytes received up to the last check after a complete message."""


class UnknownPeers:
    """The open connections of one ZMQ socket, by file descriptor. Used by the thread that reads the socket's monitor.

    `message_bytes` is the limit of bytes that a known peer may send without completing a message; None for no limit,
    where known peers have proved that they hold the cluster key.
    """

    def __init__(self, message_bytes: int | None, on_cut: Callable[[str], None]) -> None:
        self._message_bytes = message_bytes
        self._on_cut = on_cut
        self._connections: dict[int, _Connection] = {}

    def __contains__(self, fd: int) -> bool:
        return fd in self._connections

    def accepted(self, fd: int) -> None:
        """A new connection was accepted."""
        try:
            with borrowed_socket(fd) as connection:
                addresses = _addresses(connection)
        except OSError:  # already closed: EVENT_DISCONNECTED follows
            addresses = (None, None)
        self._connections[fd] = _Connection(addresses)
        unknown = [fd for fd, connection in self._connections.items() if not connection.known]
        for oldest in unknown[:-MAX_UNKNOWN_PEERS]:
            self._cut(oldest, f"more than {MAX_UNKNOWN_PEERS} connections have sent no introduction")

    def closed(self, fd: int) -> None:
        self._connections.pop(fd, None)

    def introduced(self, fd: int) -> None:
        """The peer of this connection is known from now on."""
        if self._message_bytes is None:
            self.closed(fd)
        elif fd in self._connections:
            self._connections[fd].known = True

    def message_read(self, fd: int) -> None:
        """A complete message of this connection was read."""
        if fd in self._connections:
            self._connections[fd].message_read = True

    def enforce_limits(self) -> None:
        """Close the connections that have sent too much. Call this a few times per second."""
        for fd, connection in list(self._connections.items()):
            with suppress(OSError), borrowed_socket(fd) as borrowed:  # it may be closed already
                if _addresses(borrowed) != connection.addresses:
                    continue  # the descriptor was reused
                received = tcp_counters(borrowed).received
                if connection.known and connection.message_read:
                    connection.message_read, connection.counted_from = False, received
                limit = self._message_bytes if connection.known and self._message_bytes else UNKNOWN_PEER_BYTES
                if received - connection.counted_from > limit:
                    what = "in an unfinished message" if connection.known else "without an introduction"
                    self._cut(fd, f"it has sent more than {limit} bytes {what}")

    def _cut(self, fd: int, reason: str) -> None:
        connection = self._connections.pop(fd)
        with suppress(OSError), borrowed_socket(fd) as borrowed:
            if _addresses(borrowed) == connection.addresses:
                # libzmq sees the end of the stream and closes it, which resets the connection
                borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
                borrowed.shutdown(socket.SHUT_RDWR)
                self._on_cut(f"{connection.addresses[1][0]}: {reason}")


def _addresses(connection: socket.socket) -> tuple[Any, Any]:
    return connection.getsockname(), connection.getpeername()
