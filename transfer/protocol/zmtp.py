"""ZMTP 3.0 (ZeroMQ's RFC 23) without authentication, the side that accepts connections.

libzmq bounds its queues by messages per peer, not by bytes: beside hundreds of peers that read nothing it holds
gigabytes. KV events therefore have a server of their own (scheduler/engine/zmtp_port.py), and this is its protocol.
"""

import struct
from typing import Final

MORE: Final = 1
_LONG: Final = 2
_COMMAND: Final = 4
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Signature, version 3.0, mechanism, as-server and filler."""
_SIGNATURE_AND_VERSION: Final = 11
_MECHANISM: Final = slice(12, 32)
MAX_MESSAGE_BYTES: Final = 4096
"""Of a message that a client sends, with its frames' heads: a subscription, a request or the metadata of READY."""
_SUBSCRIBE: Final = {"SUBSCRIBE": b"\x01", "CANCEL": b"\x00"}


class ZmtpError(Exception):
    """The peer speaks another protocol, or sends too much."""


def frame_head(size: int, flags: int = 0) -> bytes:
    """What precedes a frame of `size` bytes."""
    return bytes((flags, size)) if size < 256 else struct.pack(">BQ", flags | _LONG, size)


def command(name: str, data: bytes = b"") -> bytes:
    body = bytes([len(name)]) + name.encode() + data
    return frame_head(len(body), _COMMAND) + body


def ready(socket_type: str) -> bytes:
    """Ends the handshake."""
    value = socket_type.encode()
    return command("READY", b"\x0bSocket-Type" + struct.pack(">I", len(value)) + value)


class ZmtpReader:
    """Splits the bytes of one client into messages. Holds MAX_MESSAGE_BYTES and what the last `feed()` had, at most."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._frames: list[bytes] = []
        self._message_bytes = 0
        self._greeted = self.is_ready = False

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def next(self) -> tuple[str, list[bytes]] | None:
        """The next message: ("", frames), or (name of a command, [its data]), or ("greeting", []). None if it has not
        arrived whole. A subscription in the form of ZMTP 3.1, a command, is returned as one of 3.0, a message.

        Raises ZmtpError.
        """
        if not self._greeted:
            return self._read_greeting()
        while True:
            frame = self._read_frame()
            if frame is None:
                return None
            flags, body = frame
            if flags & _COMMAND:
                return self._command(body)
            if not self.is_ready:
                raise ZmtpError("a message before the handshake has ended")
            self._frames.append(body)
            if not flags & MORE:
                frames, self._frames, self._message_bytes = self._frames, [], 0
                return "", frames

    def _read_greeting(self) -> tuple[str, list[bytes]] | None:
        head = bytes(self._bytes[:_SIGNATURE_AND_VERSION])
        for place, known in ((0, 0xFF), (9, 0x7F)):
            if len(head) > place and head[place] != known:
                raise ZmtpError("no ZMTP greeting")
        if len(head) == _SIGNATURE_AND_VERSION and head[-1] < GREETING[10]:
            raise ZmtpError(f"ZMTP {head[-1]} (3 is needed)")
        if len(self._bytes) < len(GREETING):
            return None
        mechanism = bytes(self._bytes[_MECHANISM]).rstrip(b"\0")
        if mechanism != b"NULL":
            raise ZmtpError(f"mechanism {mechanism!r} (this port has no authentication)")
        del self._bytes[: len(GREETING)]
        self._greeted = True
        return "greeting", []

    def _read_frame(self) -> tuple[int, bytes] | None:
        """Flags and content of the next frame; None if it has not arrived whole."""
        if not self._bytes:
            return None
        flags = self._bytes[0]
        head_bytes = 9 if flags & _LONG else 2
        if len(self._bytes) < head_bytes:
            return None
        size = int.from_bytes(self._bytes[1:head_bytes], "big")
        end = head_bytes + size
        if self._message_bytes + end > MAX_MESSAGE_BYTES:
            raise ZmtpError(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[head_bytes:end])
        del self._bytes[:end]
        if not flags & _COMMAND:
            self._message_bytes += end
        return flags, body

    def _command(self, body: bytes) -> tuple[str, list[bytes]]:
        length = body[0] if body else 0
        name, data = body[1 : 1 + length].decode("latin-1"), body[1 + length :]
        if name in _SUBSCRIBE:
            return "", [_SUBSCRIBE[name] + data]
        self.is_ready |= name == "READY"
        return name, [data]
