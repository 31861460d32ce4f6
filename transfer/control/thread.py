"""The thread that owns all sockets of a server and sleeps in one poller. Other threads post work to it."""

import logging
import threading
from collections import deque
from collections.abc import Callable

import zmq

from ..protocol.wire import MAX_FRAME_BYTES
from .wakeup import Wakeup

logger = logging.getLogger(__name__)

SEND_QUEUE_MESSAGES = 10_000
"""ZMQ's own queue per peer. A channel has at most its window in flight, so only heartbeats can fill this queue."""
MAX_SOCKETS = 8192
"""ZMQ sockets in one process. Decode has three per prefill endpoint."""

Ready = dict[zmq.Socket[bytes], int]
"""The sockets with input."""


class ControlThread:
    """Calls `turn` with the sockets that are ready until close(), then `flush`. To be started and closed once.

    Exceptions do not end it: `on_error` is called then. `on_absence` gets the time in which the thread did not run.
    `post`, `close` and `progress_age_s` may be called from any thread; the rest is for the thread itself.
    """

    def __init__(
        self,
        name: str,
        *,
        turn: Callable[[Ready, float], None],
        flush: Callable[[], None],
        on_error: Callable[[], None],
        on_absence: Callable[[float], None],
        tick_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._turn = turn
        self._flush = flush
        self._on_error = on_error
        self._on_absence = on_absence
        self._tick_s = tick_s
        self._clock = clock
        # With one I/O thread, the end of a connection is always reported before events of its successor.
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self.poller = zmq.Poller()
        self.work: deque[Callable[[], None]] = deque()
        self._wakeup = Wakeup(self.context)
        self.poller.register(self._wakeup.receiver, zmq.POLLIN)
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.turned_at = clock()
        self.soon = False
        """Work is left that the poller does not report: the next iteration does not sleep."""

    def start(self) -> None:
        self.turned_at = self._clock()
        self._thread.start()

    def close(self) -> None:
        """End the thread and close all sockets. Do not call it on this thread. Takes a bounded time; may be called
        twice.
        """
        self.stopping.set()
        self._wakeup.ring()
        if self._thread.ident is None:
            self.release()
            return
        self._thread.join(timeout=5.0)
        if self._thread.is_alive():
            logger.error("the control thread did not end within 5 s: %s", self._thread.name)

    def post(self, action: Callable[[], None]) -> None:
        """Run it on the thread, soon."""
        self.work.append(action)
        self._wakeup.ring()

    def progress_age_s(self) -> float:
        """Time since the last iteration of the loop; well below a second while the thread is healthy."""
        return self._clock() - self.turned_at

    def turn(self) -> None:
        """One iteration of the loop: sleep in the poller, do what was posted, then what is ready."""
        ready = dict(self.poller.poll(0 if self.soon else max(1, int(self._tick_s * 1000))))
        now = self._clock()
        self._on_absence(now - self.turned_at - self._tick_s)
        self.turned_at = now
        if self._wakeup.receiver in ready:
            self._wakeup.drain()
        while self.work:
            self.guard(self.work.popleft())
        self._turn(ready, now)

    def guard(self, action: Callable[[], None]) -> bool:
        """Run it. Returns whether there was no exception."""
        try:
            action()
        except Exception:
            self._on_error()
            return False
        return True

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        """A socket for peers, with the options that all of them have."""
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        # Keepalive closes connections to machines that are down, but not to processes that are stopped.
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 5)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 2)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        return socket

    def release(self) -> None:
        self._wakeup.close()
        self.context.destroy(linger=0)

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                if not self.guard(self.turn):
                    self.stopping.wait(self._tick_s)
            self.guard(self._flush)
        finally:
            self.release()
