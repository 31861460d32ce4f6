"""What the kernel knows of a TCP connection: whether the peer has ended it, and how many bytes it has acknowledged and
sent.

Both numbers count from the start of the connection (`struct tcp_info` of <linux/tcp.h>, since Linux 4.1).
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

_ENDED: Final = (7, 8)  # TCP_CLOSE (reset), TCP_CLOSE_WAIT

NO_LINGER: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: on, for 0 s. Closing then resets the connection."""


class TcpCounters(NamedTuple):
    """Payload bytes of one connection."""

    acked: int
    """Sent by us and received by the peer's kernel; its process may not have read them."""
    received: int


def tcp_counters(connection: socket.socket) -> TcpCounters:
    """Raises OSError for sockets that are not TCP and on kernels that are too old."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    if len(info) < _SIZE:
        raise OSError(f"TCP_INFO has {len(info)} bytes, {_SIZE} are needed")
    return TcpCounters(*_COUNTERS.unpack_from(info, _BYTES_ACKED_OFFSET))


def received_bytes(fd: int) -> int:
    """Bytes received on a descriptor with another owner; cheaper than a borrowed socket. Raises OSError as above."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    try:
        return tcp_counters(connection).received
    finally:
        connection.detach()


def has_ended(fd: int) -> bool:
    """Whether the peer has closed or reset the connection of a descriptor with another owner. Raises OSError if it is
    not TCP.
    """
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _ENDED
    finally:
        connection.detach()


@contextmanager
def borrowed_socket(fd: int) -> Iterator[socket.socket]:
    """A duplicate of a descriptor with another owner, closed at the end. Raises OSError if `fd` is not a socket."""
    duplicate = os.dup(fd)
    try:
        connection = socket.socket(fileno=duplicate)
    except BaseException:
        os.close(duplicate)
        raise
    with connection:
        yield connection
