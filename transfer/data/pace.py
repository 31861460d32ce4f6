"""How fast writes to a peer end, and since when none has made progress. Over RDMA nothing else shows whether a peer is
slow or stuck: no kernel acknowledges bytes before a write ends.
"""

import time
from collections import deque
from typing import Final

from ..mooncake.engine import SendEngine

KNOWN_AFTER: Final = 4
LAST: Final = 16
UNKNOWN_BYTES_PER_S: Final = 200e6
TIMES: Final = 4
LEAST_S: Final = 1.0
MOST_S: Final = 60.0
"""A single small write that was held up must not make a dead peer look slow for an hour."""
DELIVERY_LOOK_S: Final = 0.1
"""How often a sender checks for delivered bytes while no write ends."""
ABSENCE_S: Final = 0.25
"""If two checks of the writes in flight are further apart, this process was stopped or starved, not the peer."""


class Pace:
    """The rates of the last writes to one peer."""

    def __init__(self) -> None:
        self._bytes_per_s: deque[float] = deque(maxlen=LAST)

    def add(self, size_bytes: int, seconds: float) -> None:
        """Writes of `size_bytes` have ended together, so long after the previous end or after their start."""
        self._bytes_per_s.append(size_bytes / max(seconds, 1e-6))

    def stalled_after_s(self, size_bytes: int) -> float:
        """How long no write may end if the largest in flight has so many bytes: several times what they take at the
        lowest of the last rates. All writes in flight together would take longer, but one of them ends first.
        """
        known = len(self._bytes_per_s) >= KNOWN_AFTER
        lowest = min(self._bytes_per_s) if known else UNKNOWN_BYTES_PER_S
        return min(max(LEAST_S, TIMES * size_bytes / lowest), MOST_S)


class Progress:
    """Tracks when a job last made progress: a write has ended, or bytes were delivered. After a cancellation, time
    counts from the cancellation, because the writes in flight then have to end, not only to move.
    """

    def __init__(self, engine: SendEngine) -> None:
        self._engine = engine
        self._since = self._looked_at = time.monotonic()
        self._deliveries_at = self._since + DELIVERY_LOOK_S
        self._delivered: int | None = None
        self._cancelled = False

    def look(self, *, ended: bool, cancelled: bool) -> bool:
        """Update; `ended` is whether a write has ended. Returns whether there was progress."""
        now = time.monotonic()
        absent_s, self._looked_at = now - self._looked_at - ABSENCE_S, now
        self._since += max(0.0, absent_s)
        if cancelled and not self._cancelled:
            self._cancelled, self._since = True, now
        if self._cancelled:
            return ended
        moved = ended or self._delivers(now)
        if moved:
            self._since = now
        return moved

    @property
    def still_s(self) -> float:
        """Time from the last progress to the last look. It does not end now, because this process may have been stopped
        since that look.
        """
        return self._looked_at - self._since

    def _delivers(self, now: float) -> bool:
        """Whether the kernel has delivered more bytes since the last check."""
        if now < self._deliveries_at:
            return False
        self._deliveries_at = now + DELIVERY_LOOK_S
        before, self._delivered = self._delivered, self._engine.delivered_bytes()
        return before is not None and self._delivered is not None and self._delivered > before
