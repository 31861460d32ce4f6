"""Prevents starvation by higher priorities: a request that was overtaken often enough gets their priority."""

from ...chunking.fair_queue import MAX_OVERTAKES


class Ageing:
    """Counts the requests of one queue that overtake others. After MAX_OVERTAKES, the longest-waiting request gets the
    highest priority among those that overtook it.
    """

    def __init__(self) -> None:
        self._passes = 0
        self._highest = 0

    def passed(self, priority: int, lowest: int) -> int | None:
        """A request of `priority` has left the queue; the lowest priority that remains is `lowest`. Returns a priority
        if ageing is due: the caller raises the oldest request of a lower priority to it.
        """
        if priority <= lowest:
            return None
        self._highest = max(self._highest, priority) if self._passes else priority
        self._passes += 1
        if self._passes < MAX_OVERTAKES:
            return None
        self._passes = 0
        return self._highest
