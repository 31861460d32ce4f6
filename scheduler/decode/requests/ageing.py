"""Nobody waits for ever behind higher priorities: a request that was passed often enough becomes as urgent as they."""

MAX_OVERTAKES = 16
"""How many of higher priorities may go before the one that has waited longest is raised to the highest of them."""


class Ageing:
    """Counts, for one queue, those that have passed others."""

    def __init__(self) -> None:
        self._passes = 0
        self._highest = 0

    def passed(self, priority: int, lowest: int) -> int | None:
        """One of `priority` has left the queue, in which the lowest priority is `lowest`. The priority that the oldest
        of a lower one is to be given now; None if it has to wait on.
        """
        if priority <= lowest:
            return None
        self._highest = max(self._highest, priority) if self._passes else priority
        self._passes += 1
        if self._passes < MAX_OVERTAKES:
            return None
        self._passes = 0
        return self._highest
