"""Detects stuck parts of a server: /health reports them by name within five seconds. Time in which the checking process
itself did not run does not count.
"""

import time
from collections.abc import Callable
from typing import Final

STUCK_S: Final = 4.0
"""A thread that should make progress all the time, and has made none for this long, is stuck."""
ABSENCE_S: Final = 1.0
"""If two checks are further apart, the checking process was stopped or starved."""


class RunningTime:
    """The time since its creation, without pauses of this process: at most `longest_gap_s` between two readings counts.
    Read it more often than that.
    """

    def __init__(self, longest_gap_s: float) -> None:
        self._longest_gap_s = longest_gap_s
        self._seconds = 0.0
        self._read_at = time.monotonic()

    def read(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._read_at, self._longest_gap_s)
        self._read_at = now
        return self._seconds


class Watch:
    """Tells whether this process has run without a pause. Only then does a part without progress count as stuck."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._checked_at = self._running_since = clock()

    def check(self) -> None:
        """Call this a few times a second."""
        now = self._clock()
        if now - self._checked_at > ABSENCE_S:
            self._running_since = now
        self._checked_at = now

    @property
    def is_steady(self) -> bool:
        """Whether this process has run for STUCK_S without an absence."""
        return self.has_run_for(STUCK_S)

    def has_run_for(self, seconds: float) -> bool:
        """Whether this process has run for more than this time without an absence."""
        now = self._clock()
        return now - self._checked_at <= ABSENCE_S and now - self._running_since > seconds

    def is_stuck(self, age_s: float, limit_s: float = STUCK_S) -> bool:
        """Whether something without progress for `age_s` is stuck."""
        return age_s > limit_s and self.is_steady
