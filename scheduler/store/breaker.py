"""Circuit breaker of the KV store: after a failure, nothing is sent to the store until a ping has succeeded. Pure."""

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 5.0
"""Longest time between two pings: a store that was away for long is used again this soon after its return."""


class Breaker:
    """Open (no use of the store) until the first ping has succeeded, and after every failure."""

    def __init__(self) -> None:
        self.problem: str | None = "not connected yet"
        """Why the store is not used; None if it is."""
        self._wait_s = FIRST_WAIT_S
        self._ping_at = 0.0
        self._pinging = False

    @property
    def closed(self) -> bool:
        """The store may be used."""
        return self.problem is None

    def failed(self, problem: str, now: float) -> bool:
        """The store could not be used. Returns whether this opened the breaker."""
        opens = self.closed
        self.problem = problem
        if opens:
            self._wait_s = FIRST_WAIT_S
            self._ping_at = now + self._wait_s
        return opens

    def take_ping(self, now: float) -> bool:
        """Whether to send a ping now; then `pinged` has its result."""
        if self.closed or self._pinging or now < self._ping_at:
            return False
        self._pinging = True
        return True

    def pinged(self, problem: str | None, now: float) -> bool:
        """A ping has ended. Returns whether this closed the breaker. After a failure, the next ping waits longer."""
        closes = not self.closed and problem is None
        self._pinging, self.problem = False, problem
        if problem is None:
            self._wait_s = FIRST_WAIT_S
        else:
            self._ping_at = now + self._wait_s
            self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
        return closes
