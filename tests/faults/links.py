"""TCP proxies for the control link and the data link: tests cut, stall, delay and reset them, or lose data."""

import collections
import os
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

from tests.transfer.mooncake.mooncake_proxy import MooncakeProxy

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with a time of 0: close() sends RST."""
RETRANSMITTED_S = 0.2
"""Linux's minimum retransmission timeout."""
_PIECE_BYTES = 65536
_TICK_S = 0.01

Address = tuple[str, int]


class _Stream:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.pieces: collections.deque[tuple[float, bytes]] = collections.deque()
        """Bytes that are held back, and the time at which each piece is due."""


class Link:
    """A TCP proxy with one thread. Ends with its `with` block. The attributes may be set from any thread."""

    def __init__(self, target: Callable[[], Address], listener: socket.socket | None = None) -> None:
        self._target = target
        self._listener = listener or socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.delay_s = 0.0
        self.loss = 0.0
        """The fraction of pieces that arrive RETRANSMITTED_S late and delay those after them, like lost segments."""
        self.stalled = False
        """Connections stay open, and no byte is passed on."""
        self.refusing = False
        """New connections are reset."""
        self.held_bytes = 0
        """Bytes that arrived while the link was stalled."""
        self.connections = 0
        self._draw = random.Random(0)
        self._streams: dict[socket.socket, _Stream] = {}
        """By the socket that is read."""
        self._selector = selectors.DefaultSelector()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK)
        self._requests: collections.deque[tuple[Callable[[], None], threading.Event]] = collections.deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"link-{self.port}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        self._selector.close()
        os.close(self._wakeup)

    def cut(self) -> int:
        """Close all connections and refuse new ones until `heal()`. Returns how many were closed."""
        self.refusing = True
        return self._close_connections(with_reset=False)

    def reset(self) -> int:
        """Reset all connections; new ones are accepted. Returns how many were reset."""
        return self._close_connections(with_reset=True)

    def heal(self) -> None:
        self.refusing, self.stalled, self.delay_s, self.loss = False, False, 0.0, 0.0

    def _close_connections(self, *, with_reset: bool) -> int:
        counts: list[int] = []

        def close() -> None:
            counts.append(len(self._streams) // 2)
            for end in list(self._streams):
                self._close(end, with_reset=with_reset)

        done = threading.Event()
        self._requests.append((close, done))
        os.eventfd_write(self._wakeup, 1)
        assert done.wait(10)
        return counts[0]

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        while not self._closing:
            waiting = any(stream.pieces for stream in self._streams.values())
            for key, _ in self._selector.select(_TICK_S if waiting else 0.2):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._wakeup:
                    os.eventfd_read(self._wakeup)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)
            while self._requests:
                action, done = self._requests.popleft()
                action()
                done.set()
            self._pass_on()
        for end in list(self._streams):
            self._close(end, with_reset=False)
        self._listener.close()

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far: socket.socket | None = None
        if not self.refusing:
            with suppress(OSError):  # the server is being restarted
                far = socket.create_connection(self._target(), 5)
        if far is None:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            near.close()
            return
        self.connections += 1
        for source, sink in ((near, far), (far, near)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._streams[source] = _Stream(source, sink)
            self._selector.register(source, selectors.EVENT_READ)

    def _read(self, source: socket.socket) -> None:
        stream = self._streams.get(source)
        if stream is None:  # closed by an event before this one
            return
        try:
            data = source.recv(_PIECE_BYTES)
        except OSError:
            data = b""
        if not data:
            self._close(source, with_reset=False)
            return
        if self.stalled:
            self.held_bytes += len(data)
        late_s = RETRANSMITTED_S if self._draw.random() < self.loss else 0.0
        stream.pieces.append((time.monotonic() + self.delay_s + late_s, data))

    def _pass_on(self) -> None:
        now = time.monotonic()
        for stream in list(self._streams.values()):
            while stream.pieces and not self.stalled and stream.pieces[0][0] <= now:
                _, data = stream.pieces.popleft()
                try:
                    stream.sink.settimeout(20)
                    stream.sink.sendall(data)
                except OSError:
                    self._close(stream.source, with_reset=False)
                    break

    def _close(self, end: socket.socket, *, with_reset: bool) -> None:
        stream = self._streams.pop(end, None)
        if stream is None:
            return
        self._streams.pop(stream.sink, None)
        for side in (end, stream.sink):
            self._selector.unregister(side)
            if with_reset:
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            side.close()


class DataLink(MooncakeProxy):
    """Both ports of a receive engine, each behind a Link; `session` is the address to announce."""

    def __init__(self, session: str) -> None:
        self._data_link: Link | None = None
        super().__init__(session, 1e12)
        host, _, port = self.session.rpartition(":")
        self._handshake_link = Link(lambda: (host, int(port)))
        self.session = f"127.0.0.1:{self._handshake_link.port}"
        self._data_link = Link(self._data_address, self._data)

    @property
    def links(self) -> Sequence[Link]:
        assert self._data_link is not None
        return (self._handshake_link, self._data_link)

    def __exit__(self, *_: object) -> None:
        for link in self.links:
            link.__exit__()
        super().__exit__()

    def _accept_data(self) -> None:
        """Does nothing: the Link accepts these connections."""

    def _data_address(self) -> Address:
        assert self._data_at is not None, "a handshake comes first"
        return self._data_at
