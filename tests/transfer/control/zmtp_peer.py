"""A client that implements the handshake of ZMTP 3.0 itself and then sends invalid or endless messages."""

import socket
import struct
import time
from typing import Self

OLD_PROTOCOL = b"\x01\x00" + b"\x02\x00x" * 1000
"""ZMTP 1.0: a connection without a handshake, and a thousand messages of three bytes each."""
FRAME_MORE, FRAME_LONG, COMMAND = b"\x01", b"\x02", b"\x04"


class ZmtpPeer:
    """A connection after the greeting; with the mechanism NULL, after the handshake. Ends with its `with` block."""

    def __init__(self, port: int, *, mechanism: str = "NULL") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=5)
        greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + mechanism.encode().ljust(20, b"\0") + bytes(32)
        self._socket.sendall(greeting)
        if mechanism == "NULL":
            body = b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b"")
            self._socket.sendall(COMMAND + bytes([len(body)]) + body)
            answer = b""
            while b"READY" not in answer:
                answer += self._socket.recv(4096)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def cut(self) -> bool:
        """Whether the other side has closed the connection."""
        self._socket.settimeout(0.2)
        try:
            while self._socket.recv(4096):
                pass
        except TimeoutError:
            return False
        except ConnectionResetError:
            pass
        return True

    def send_frame_until_cut(self, most_bytes: int) -> int:
        """Send up to `most_bytes` of a longer frame. Returns the bytes sent before the other side closed."""
        return self._send(FRAME_LONG + struct.pack(">Q", most_bytes + 1), bytes(1 << 16), most_bytes)

    def send_parts_until_cut(self, most_bytes: int) -> int:
        """The same with a message of many small parts and no last one."""
        return self._send(b"", (FRAME_MORE + b"\x01x") * 20_000, most_bytes)

    def _send(self, head: bytes, piece: bytes, most_bytes: int) -> int:
        sent = 0
        try:
            self._socket.sendall(head)
            while sent < most_bytes:
                sent += self._socket.send(piece[: most_bytes - sent])
                time.sleep(0.001)  # so that the other side checks its limits several times meanwhile
        except (ConnectionResetError, BrokenPipeError, TimeoutError):
            pass  # TimeoutError: the other side does not read, but has not closed the connection
        return sent


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
