"""How fast writes to a peer end. Over RDMA nothing else shows whether a peer is slow or stuck: no kernel acknowledges
bytes before a write ends.
"""

from collections import deque
from typing import Final

KNOWN_AFTER: Final = 4
LAST: Final = 16
UNKNOWN_BYTES_PER_S: Final = 200e6
TIMES: Final = 4
LEAST_S: Final = 1.0
MOST_S: Final = 60.0
"""A single small write that was held up must not make a dead peer look slow for an hour."""


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
