"""Measures how late an event loop is, from a thread beside it."""

import asyncio
import collections
import threading
import time
from collections.abc import Callable

INTERVAL_S = 0.25
KEPT_S = 60


class LoopLag:
    """Asks `late_s` every INTERVAL_S how late the loop is. Keeps the longest lag of each second of the last minute.

    A call that holds the interpreter's lock stops this thread too: then its own lateness is the lag.
    """

    def __init__(self, late_s: Callable[[], float]) -> None:
        self._late_s = late_s
        self._seconds: collections.deque[tuple[int, float]] = collections.deque(maxlen=KEPT_S)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop-lag", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def longest_s(self) -> float:
        """The longest lag within the last minute, also of a stall that lasts."""
        oldest = time.monotonic() - KEPT_S
        return max((lag_s for second, lag_s in list(self._seconds) if second >= oldest), default=0.0)

    def _run(self) -> None:
        woken_at = time.monotonic()
        while not self._closed.wait(INTERVAL_S):
            late_s = max(self._late_s(), time.monotonic() - woken_at - INTERVAL_S)
            woken_at = time.monotonic()
            second = int(woken_at)
            if self._seconds and self._seconds[-1][0] == second:
                self._seconds[-1] = second, max(late_s, self._seconds[-1][1])
            else:
                self._seconds.append((second, late_s))


class Lateness:
    """How late an asyncio loop is: the time that a callback waits. Called from another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked_at: float | None = None
        self._waited_s = 0.0

    def __call__(self) -> float:
        if (asked_at := self._asked_at) is not None:
            return time.monotonic() - asked_at
        waited_s, self._waited_s = self._waited_s, 0.0
        self._asked_at = time.monotonic()
        self._loop.call_soon_threadsafe(self._run)
        return waited_s

    def _run(self) -> None:
        assert self._asked_at is not None
        self._waited_s = time.monotonic() - self._asked_at
        self._asked_at = None
