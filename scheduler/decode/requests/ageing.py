"""Prevents starvation by higher priorities: a request that was overtaken often enough gets their priority."""

from ...chunking.fair_queue import MAX_OVERTAKES


class Ageing:
    """Counts, for one queue, the requests that overtake others. After MAX_OVERTAKES the longest-waiting one gets the
    highest of their priorities.
    """

    def __init__(self) -> None:
        self._passes = 0
        self._highest = 0

    def passed(self, priority: int, lowest: int) -> int | None:
        """A request of `priority` has left the queue, whose lowest priority is `lowest`. Returns the priority to which
        the oldest request of a lower one is raised now, if any.
        """
        if priority <= lowest:
            return None
        self._highest = max(self._highest, priority) if self._passes else priority
        self._passes += 1
        if self._passes < MAX_OVERTAKES:
            return None
        self._passes = 0
        return self._highest
