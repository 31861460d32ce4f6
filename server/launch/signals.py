"""Tells a second signal of the user from a copy of the first, and ends a server in bounded time after a signal."""

import asyncio
import contextlib
import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

log = logging.getLogger("pdserve.frontend")

COPY_S = 0.1
"""The same signal again within this time is a copy: `timeout` sends it to its child and then to the process group."""
ANSWER_S = 0.5
"""An event loop that runs nothing for this time after a second signal is blocked."""
LAST_S = 0.25
"""Time in which a process ends."""


class SignalCopies:
    """A second signal skips the drain, so a copy of the first must not count as one."""

    def __init__(self) -> None:
        self._received_at: dict[int, float] = {}

    def is_copy(self, number: int) -> bool:
        """Call once for each signal received."""
        now = time.monotonic()
        last, self._received_at[number] = self._received_at.get(number, -math.inf), now
        return now - last < COPY_S


class SignalWatch:
    """Ends this process in bounded time after SIGTERM or SIGINT, also if its event loop is blocked or waits for long.

    Python writes the number of a signal to a pipe as soon as it arrives, on whatever thread. The event loop reads such
    a pipe; here a thread reads another one first, and passes the numbers on.

    `end()`, which ends the process, is called within `bound_s()` of the first signal, or ANSWER_S of a second one if
    the loop is blocked then.
    """

    def __init__(self, bound_s: Callable[[], float], end: Callable[[], NoReturn]) -> None:
        """Call on the main thread, in the event loop, after its signal handlers are set."""
        self._bound_s = bound_s
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._pipe, writing = os.pipe()
        os.set_blocking(writing, False)
        self._pipe_of_loop = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="signals", daemon=True).start()

    def _run(self) -> None:
        ends_at = look_at = math.inf
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while True:
            wait_s = min(ends_at, look_at) - time.monotonic()
            if poll.poll(None if wait_s == math.inf else max(0.0, 1000 * wait_s)):
                numbers = os.read(self._pipe, 64)
                with contextlib.suppress(OSError):  # the event loop has ended
                    os.write(self._pipe_of_loop, numbers)
                if {signal.SIGTERM, signal.SIGINT}.isdisjoint(numbers):
                    continue
                if ends_at == math.inf:
                    ends_at = time.monotonic() + self._bound_s() - LAST_S
                else:
                    look_at = time.monotonic()
            elif time.monotonic() >= ends_at or not self._answers():
                break
            else:
                look_at = math.inf
        log.error("the server has not ended in time after a signal, and is ended now")
        self._end()

    def _answers(self) -> bool:
        answered = threading.Event()
        try:
            self._loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # it is closed, and the process about to exit
            return True
        return answered.wait(ANSWER_S)
