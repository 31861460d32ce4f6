"""Tells a second signal of the user from a copy of the first."""

import math
import time

COPY_S = 0.1
"""The same signal again within this time is a copy: `timeout` sends it to its child and then to the process group."""


class SignalCopies:
    """A second signal skips the drain, so a copy of the first must not count as one."""

    def __init__(self) -> None:
        self._received_at: dict[int, float] = {}

    def is_copy(self, number: int) -> bool:
        """Call once for each signal received."""
        now = time.monotonic()
        last, self._received_at[number] = self._received_at.get(number, -math.inf), now
        return now - last < COPY_S
