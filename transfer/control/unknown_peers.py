"""Bounds what connections to a ZMQ port may cost before their peer is known.

libzmq bounds single frames (MAXMSGSIZE) and complete messages (RCVHWM). It does not bound a message whose parts never
end, a frame that never ends on each of many connections, or the number of connections. Whoever reaches the port can do
all of that, with a cluster key during the handshake and without one at any time. The kernel counts what it receives on
each connection, and a connection that is shut down from outside ends inside libzmq as if the peer had closed it.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from ..tcp_info import NO_LINGER, borrowed_socket, tcp_counters

MAX_STRANGERS: Final = 512
"""Connections whose peer has not introduced itself; the oldest one is cut for a new one."""
STRANGER_BYTES: Final = 1 << 20
"""Most that a stranger may send. An introduction has some kilobytes."""


@dataclass(slots=True)
class _Connection:
    addresses: tuple[Any, Any]  # whatever the address family has
    known: bool = False
    heard: bool = False
    """A complete message was read since the last look."""
    counted_from: int = 0
    """Bytes received up to the last look after a complete message."""


class Strangers:
    """The open connections of one ZMQ socket, by file descriptor. For the thread that reads the socket's monitor.

    `message_bytes` is the most that a known peer may send without completing a message; None where known peers have
    proved that they hold the cluster key, and may send what they like.
    """

    def __init__(self, message_bytes: int | None, on_cut: Callable[[str], None]) -> None:
        self._message_bytes = message_bytes
        self._on_cut = on_cut
        self._connections: dict[int, _Connection] = {}

    def __contains__(self, fd: int) -> bool:
        return fd in self._connections

    def accepted(self, fd: int) -> None:
        """The socket has a new connection."""
        try:
            with borrowed_socket(fd) as connection:
                addresses = _addresses(connection)
        except OSError:  # closed again: its end is among the next events
            addresses = (None, None)
        self._connections[fd] = _Connection(addresses)
        strangers = [fd for fd, connection in self._connections.items() if not connection.known]
        for oldest in strangers[:-MAX_STRANGERS]:
            self._cut(oldest, f"more than {MAX_STRANGERS} connections have not introduced themselves")

    def closed(self, fd: int) -> None:
        self._connections.pop(fd, None)

    def introduced(self, fd: int) -> None:
        """The peer is known from now on."""
        if self._message_bytes is None:
            self.closed(fd)
        elif fd in self._connections:
            self._connections[fd].known = True

    def heard(self, fd: int) -> None:
        """A complete message of this connection was read."""
        if fd in self._connections:
            self._connections[fd].heard = True

    def look(self) -> None:
        """Cut the connections that have sent too much. To be called a few times a second."""
        for fd, connection in list(self._connections.items()):
            with suppress(OSError), borrowed_socket(fd) as borrowed:  # its end may be among the next events
                if _addresses(borrowed) != connection.addresses:
                    continue  # the descriptor has another owner already
                received = tcp_counters(borrowed).received
                if connection.known and connection.heard:
                    connection.heard, connection.counted_from = False, received
                limit = self._message_bytes if connection.known and self._message_bytes else STRANGER_BYTES
                if received - connection.counted_from > limit:
                    what = "in an unfinished message" if connection.known else "without introducing itself"
                    self._cut(fd, f"it has sent more than {limit} bytes {what}")

    def _cut(self, fd: int, reason: str) -> None:
        connection = self._connections.pop(fd)
        with suppress(OSError), borrowed_socket(fd) as borrowed:
            if _addresses(borrowed) == connection.addresses:
                # libzmq sees the end of the stream and closes it, which resets the connection: nothing stays behind
                borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
                borrowed.shutdown(socket.SHUT_RDWR)
                self._on_cut(f"{connection.addresses[1][0]}: {reason}")


def _addresses(connection: socket.socket) -> tuple[Any, Any]:
    return connection.getsockname(), connection.getpeername()
