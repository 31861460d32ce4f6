"""Two helpers of a thread that sleeps in a ZMQ poller: wake-up from other threads, and connection events."""

import contextlib
import itertools
import threading

import zmq
from zmq.utils.monitor import parse_monitor_message


class Wakeup:
    """Wakes a poller from any thread: register `receiver`, `drain()` it when it is readable, `ring()` from anywhere."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._lock = threading.Lock()  # ZMQ sockets are for one thread at a time
        self._sender: zmq.Socket[bytes] | None = context.socket(zmq.PAIR)
        self._sender.bind("inproc://wakeup")
        self.receiver: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.receiver.connect("inproc://wakeup")

    def ring(self) -> None:
        """No-op after close()."""
        # A full queue means that the thread will wake up anyway.
        with self._lock, contextlib.suppress(zmq.Again):
            if self._sender is not None:
                self._sender.send(b"", zmq.NOBLOCK)

    def drain(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self.receiver.recv(zmq.NOBLOCK)

    def close(self) -> None:
        with self._lock:
            if self._sender is not None:
                self._sender.close(linger=0)
                self._sender = None
        self.receiver.close(linger=0)


class ConnectionMonitor:
    """Reports connection events of `watched`; register `socket` and `read()` it when it is readable."""

    _numbers = itertools.count()

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], watched: zmq.Socket[bytes], events: int) -> None:
        self._watched = watched
        address = f"inproc://monitor-{next(self._numbers)}"
        watched.monitor(address, events)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)  # ZMQ's I/O thread would block on a full queue
        self.socket.connect(address)

    def read(self) -> tuple[int, int] | None:
        """The next (event, value); None if there is none."""
        try:
            event = parse_monitor_message(self.socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return None
        return int(event["event"]), int(event["value"])

    def close(self) -> None:
        """Call before the watched socket is closed."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)
