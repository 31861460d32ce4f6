"""What the kernel knows of a TCP connection: how many bytes the peer has acknowledged and how many it has sent.

Both count from the start of the connection (`struct tcp_info` of <linux/tcp.h>, since Linux 4.1).
"""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

_BYTES_ACKED_OFFSET: Final = 120
_COUNTERS: Final = struct.Struct("=QQ")  # tcpi_bytes_acked, tcpi_bytes_received
_SIZE: Final = _BYTES_ACKED_OFFSET + _COUNTERS.size

NO_LINGER: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: on, for 0 s. Closing then resets the connection."""


class TcpCounters(NamedTuple):
    """Payload bytes of one connection."""

    acked: int
    """Sent by us and received by the peer's kernel; whether its process has read them is another matter."""
    received: int


def tcp_counters(connection: socket.socket) -> TcpCounters:
    """Raises OSError where the kernel does not say: not a TCP socket, or a kernel that is too old."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    if len(info) < _SIZE:
        raise OSError(f"TCP_INFO has {len(info)} bytes, {_SIZE} are needed")
    return TcpCounters(*_COUNTERS.unpack_from(info, _BYTES_ACKED_OFFSET))


@contextmanager
def borrowed_socket(fd: int) -> Iterator[socket.socket]:
    """A duplicate of a descriptor that somebody else owns, closed at the end. Raises OSError when `fd` is no socket."""
    duplicate = os.dup(fd)
    try:
        connection = socket.socket(fileno=duplicate)
    except BaseException:
        os.close(duplicate)
        raise
    with connection:
        yield connection
