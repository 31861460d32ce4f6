"""A proxy between a sender and a receive engine that limits the bandwidth or cuts the connection."""

import json
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Self

_HEADER = struct.Struct("<QB")
_PIECE_BYTES = 16 << 10


class MooncakeProxy:
    """Stands between senders and the engine at `session`: handshakes return its description with the data port of the
    proxy. `bytes_per_s` is shared by all data connections, in each direction.

    Socket buffers are small, so that few bytes are on the way in the proxy.
    """

    def __init__(self, session: str, bytes_per_s: float) -> None:
        host, _, port = session.rpartition(":")
        self._handshake_at = host, int(port)
        self.bytes_per_s = bytes_per_s
        self.flows = threading.Event()
        """Bytes wait while it is not set."""
        self.flows.set()
        self._handshakes = socket.create_server(("127.0.0.1", 0))
        self._data = socket.socket()
        self._data.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * _PIECE_BYTES)
        self._data.bind(("127.0.0.1", 0))
        self._data.listen()
        self._data_at: tuple[str, int] | None = None
        self._free_at = {"up": 0.0, "down": 0.0}
        self._lock = threading.Lock()
        self._open: list[socket.socket] = [self._handshakes, self._data]
        self._threads: list[threading.Thread] = []
        self.session = f"127.0.0.1:{self._handshakes.getsockname()[1]}"
        self._start(self._accept_handshakes)
        self._start(self._accept_data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flows.set()
        self.bytes_per_s = 1e12
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in self._open:
            end.close()

    def _start(self, target: object, *values: object) -> None:
        assert callable(target)
        self._threads.append(threading.Thread(target=target, args=values, daemon=True))
        self._threads[-1].start()

    def _accept_handshakes(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._handshakes.accept()
                with suppress(OSError):  # a client that leaves does not end the proxy
                    self._answer(near)

    def _answer(self, near: socket.socket) -> None:
        near.settimeout(5)
        with near, socket.create_connection(self._handshake_at, 5) as far:
            far.sendall(self._frame(near))
            header = _read(far, _HEADER.size)
            length, kind = _HEADER.unpack(header)
            description = json.loads(_read(far, length - 1))
            if "tcp_data_port" in description:
                self._data_at = self._handshake_at[0], description["tcp_data_port"]
                description["tcp_data_port"] = self._data.getsockname()[1]
            body = json.dumps(description).encode()
            near.sendall(_HEADER.pack(len(body) + 1, kind) + body)

    def _frame(self, near: socket.socket) -> bytes:
        header = _read(near, _HEADER.size)
        return header + _read(near, _HEADER.unpack(header)[0] - 1)

    def _accept_data(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._data.accept()
                assert self._data_at is not None, "clients learn the data port from a handshake"
                far = socket.create_connection(self._data_at)
                self._open += near, far
                self._start(self._copy, near, far, "up")
                self._start(self._copy, far, near, "down")

    def _copy(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        with suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                self.flows.wait()
                with self._lock:
                    begins = max(time.monotonic(), self._free_at[direction])
                    self._free_at[direction] = ends = begins + len(data) / self.bytes_per_s
                time.sleep(max(0.0, ends - time.monotonic()))
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _read(connection: socket.socket, size_bytes: int) -> bytes:
    received = b""
    while len(received) < size_bytes:
        part = connection.recv(size_bytes - len(received))
        if not part:
            raise ConnectionResetError
        received += part
    return received
