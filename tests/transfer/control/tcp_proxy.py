"""A TCP proxy that simulates network faults of a control connection."""

import socket
import threading
import time
from contextlib import suppress


class TcpProxy:
    """TCP between decode and prefill that a test can cut, delay, slow down or split. Ends with its `with` block."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.flows = threading.Event()
        """Bytes wait while it is not set."""
        self.flows.set()
        self.delay_s = 0.0
        """Delay of every piece of a stream."""
        self.piece_bytes = 65536
        self.both_ends = True
        """Whether prefill's end is closed together with decode's end of a connection."""
        self.sent_by_decode = bytearray()
        """Bytes of all connections, from decode to prefill."""
        self._near: list[socket.socket] = []
        self._far: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> "TcpProxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.both_ends = True
        self.flows.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(5)
        for end in (self._listener, *self._near, *self._far):
            end.close()

    @property
    def connections(self) -> int:
        """The number of connections so far."""
        return len(self._far)

    def cut(self) -> None:
        """Close all connections; with `both_ends` unset, prefill does not notice."""
        for end in [*self._near, *(self._far if self.both_ends else ())]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def half_close(self) -> None:
        """Half-close: decode sees the end of the stream from prefill, but can still send."""
        for end in self._near:
            with suppress(OSError):
                end.shutdown(socket.SHUT_WR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # the server is being restarted
                    near.close()
                    continue
                self._near.append(near)
                self._far.append(far)
                for source, sink in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._copy, args=(source, sink)))
                    self._threads[-1].start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(self.piece_bytes):
                if sink in self._far:
                    self.sent_by_decode += data
                self.flows.wait()
                time.sleep(self.delay_s)
                sink.sendall(data)
        if self.both_ends:
            with suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)
