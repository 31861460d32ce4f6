"""Limits the memory that connections of unknown peers to a ZMQ port can use.

libzmq bounds single frames (MAXMSGSIZE) and complete messages (RCVHWM). It does not bound the number of parts of a
message, the incomplete frames of many connections together, or the number of connections. Any client that reaches the
port can exploit that: with a cluster key only during the handshake, without one at any time. Without a key it could
also send messages that take thousands of times longer to answer than to send.

So this module reads the kernel's count of the bytes received on each connection, and shuts down those that send too
much. libzmq treats such a connection as closed by the peer.
"""

import itertools
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ..tcp_info import NO_LINGER, borrowed_socket, received_bytes

MAX_UNKNOWN_PEERS: Final = 512
"""Connections without an introduction; a new one closes the oldest."""
UNKNOWN_PEER_BYTES: Final = 1 << 20
"""Limit of bytes from an unknown peer. An introduction has some kilobytes."""
UNKNOWN_PEER_MESSAGES: Final = 64
"""Limit of messages from an unknown peer in MESSAGES_S. A decode server repeats its introduction once a second."""
MESSAGES_S: Final = 30.0
CUTS_PER_CALL: Final = 64
"""Most connections that one call of `cut_excess()` closes: its thread has other work."""


@dataclass(slots=True)
class _Connection:
    inode: int | None
    """Identifies the socket, because its descriptor may be reused; None if it was closed before this could be read."""
    message_read: bool = False
    """A complete message was read since the last check."""
    counted_from: int = 0
    """Bytes received up to the last check after a complete message."""
    messages: int = 0
    """Those of an unknown peer since `messages_from`."""
    messages_from: float = 0.0
    message_bytes: int = 0
    """Of all its messages."""


class UnknownPeers:
    """The open connections of one ZMQ socket, by file descriptor. Used by the thread that reads the socket's monitor.

    `message_bytes` is how many bytes a known peer may send without completing a message. None is no limit, for sockets
    whose known peers have proved that they hold the cluster key.
    """

    def __init__(self, message_bytes: int | None, on_cut: Callable[[str], None]) -> None:
        self._message_bytes = message_bytes
        self._on_cut = on_cut
        self.port: int | None = None
        """The bound port, once it is known. Only its connections are cut: events may be read late, and a descriptor may
        then belong to another socket of this process.
        """
        self._unknown: dict[int, _Connection] = {}
        """Oldest first."""
        self._known: dict[int, _Connection] = {}

    def __contains__(self, fd: int) -> bool:
        return fd in self._unknown or fd in self._known

    def accepted(self, fd: int) -> None:
        """A new connection was accepted. Call `cut_excess()` after all pending events are read."""
        self.closed(fd)
        try:
            inode = os.fstat(fd).st_ino
        except OSError:  # already closed: EVENT_DISCONNECTED follows
            inode = None
        self._unknown[fd] = _Connection(inode)

    def closed(self, fd: int) -> None:
        self._unknown.pop(fd, None)
        self._known.pop(fd, None)

    def introduced(self, fd: int) -> None:
        """The peer of this connection is known from now on."""
        connection = self._unknown.pop(fd, None)
        if connection is not None and self._message_bytes is not None:
            self._known[fd] = connection

    def message_read(self, fd: int, size_bytes: int) -> bool:
        """A complete message of this connection was read. Returns False if it must be ignored: the connection was
        closed, maybe now. ZMQ may have kept messages of an earlier connection with the same descriptor: if they are
        more than this one has received, it is not blamed for them.
        """
        if (known := self._known.get(fd)) is not None:
            known.message_read = True
            return True
        unknown = self._unknown.get(fd)
        if unknown is None:
            return False
        now = time.monotonic()
        if now > unknown.messages_from + MESSAGES_S:
            unknown.messages, unknown.messages_from = 0, now
        unknown.messages += 1
        unknown.message_bytes += size_bytes
        if unknown.messages <= UNKNOWN_PEER_MESSAGES:
            return True
        if unknown.message_bytes <= self._received(fd, unknown):
            self.cut(fd, f"it has sent more than {UNKNOWN_PEER_MESSAGES} messages without an introduction")
        return False

    def cut_excess(self) -> bool:
        """Close the oldest of too many unknown connections, CUTS_PER_CALL at most. Returns whether some are left."""
        excess = len(self._unknown) - MAX_UNKNOWN_PEERS
        for fd in list(itertools.islice(self._unknown, max(0, min(excess, CUTS_PER_CALL)))):
            self.cut(fd, f"more than {MAX_UNKNOWN_PEERS} connections have not completed the handshake")
        return excess > CUTS_PER_CALL

    def enforce_limits(self) -> None:
        """Close the connections that have sent too much. Call this a few times per second."""
        for fd, connection in list(self._unknown.items()):
            if self._received(fd, connection) > UNKNOWN_PEER_BYTES:
                self.cut(fd, f"it has sent more than {UNKNOWN_PEER_BYTES} bytes without completing the handshake")
        for fd, connection in list(self._known.items()):
            assert self._message_bytes is not None
            received = self._received(fd, connection)
            if connection.message_read:
                connection.message_read, connection.counted_from = False, received
            if received - connection.counted_from > self._message_bytes:
                self.cut(fd, f"it has sent more than {self._message_bytes} bytes in an unfinished message")

    @staticmethod
    def _received(fd: int, connection: _Connection) -> int:
        """Bytes received; 0 if the connection is closed or its descriptor was reused."""
        with suppress(OSError):
            if os.fstat(fd).st_ino == connection.inode:
                return received_bytes(fd)
        return 0

    def cut(self, fd: int, reason: str) -> None:
        """Close the connection."""
        connection = self._unknown.pop(fd, None) or self._known.pop(fd)
        with suppress(OSError), borrowed_socket(fd) as borrowed:
            same = os.fstat(borrowed.fileno()).st_ino == connection.inode
            if same and self.port in (None, borrowed.getsockname()[1]):
                host = borrowed.getpeername()[0]
                # libzmq sees the end of the stream and closes it, which resets the connection
                borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
                borrowed.shutdown(socket.SHUT_RDWR)
                self._on_cut(f"{host}: {reason}")
