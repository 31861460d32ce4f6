"""How fast the queue of a decode server moves, and how long it waited because prefill servers were busy."""

import collections
import dataclasses
from collections.abc import Collection

MEASURED_S = 30.0
"""The rate is measured over this much time in which prompts waited."""
CARRIED_S = 5.0
"""Measured time that is kept when the queue becomes empty. The next burst fills the queue before any prompt of it is
served, so at first only this older measurement exists.
"""
SHORTEST_S = 1.0
"""Shortest time to compute a rate from: less would measure a burst."""


@dataclasses.dataclass(slots=True)
class _Busy:
    """Since when the prefill servers at an endpoint (or all) take no prompt, and for how long in total before that."""

    since: float | None = None
    before_s: float = 0.0

    def total_s(self, now: float) -> float:
        return self.before_s + (now - self.since if self.since is not None else 0.0)


class QueuePace:
    """Measures served prompts per second of waiting time, and the busy time by endpoint. Call `note` in every turn."""

    def __init__(self) -> None:
        self._busy: dict[str | None, _Busy] = {}
        self._served: collections.deque[float] = collections.deque()
        """When prompts were served, on a clock that runs only while prompts wait."""
        self._waiting_since: float | None = None
        self._carried_s = 0.0

    def note(self, queued: int, busy: Collection[str | None], now: float) -> None:
        """`queued` prompts are left in the queue; at the endpoints in `busy`, because prefill servers take no more."""
        if not queued:
            self._busy.clear()
            self._end_wait(now)
            return
        if self._waiting_since is None:
            self._waiting_since = now
        for endpoint in {*self._busy, *busy}:
            clock = self._busy.setdefault(endpoint, _Busy())
            if endpoint not in busy:
                clock.before_s, clock.since = clock.total_s(now), None
            elif clock.since is None:
                clock.since = now

    def is_busy(self, endpoint: str | None) -> bool:
        """Whether prompts for this endpoint wait because prefill servers take no more."""
        return endpoint in self._busy and self._busy[endpoint].since is not None

    def busy_s(self, endpoint: str | None, now: float) -> float:
        """Total busy time. Only the difference between two calls has a meaning."""
        return self._busy[endpoint].total_s(now) if endpoint in self._busy else 0.0

    def served(self, now: float) -> None:
        """The KV of a prompt has arrived."""
        if self._waiting_since is not None:
            waited_s = self._waited_s(now)
            self._served.append(waited_s)
            self._forget_before(waited_s - MEASURED_S)

    def wait_s(self, queued: int, now: float, *, most_s: float) -> float:
        """Expected wait of a prompt behind `queued` others, `most_s` at most."""
        if self._waiting_since is None:
            return 0.0
        waited_s = self._waited_s(now)
        self._forget_before(waited_s - MEASURED_S)
        measured_s = min(waited_s, MEASURED_S)
        if not self._served:  # none in all this time: assume that the first is served now
            return min(most_s, max(SHORTEST_S, queued * measured_s))
        return min(most_s, queued * max(SHORTEST_S, measured_s) / len(self._served))

    def _waited_s(self, now: float) -> float:
        return self._carried_s + (now - self._waiting_since if self._waiting_since is not None else 0.0)

    def _end_wait(self, now: float) -> None:
        """The queue is empty. Keep the last CARRIED_S."""
        if self._waiting_since is None:
            return
        waited_s = self._waited_s(now)
        self._waiting_since = None
        self._carried_s = min(waited_s, CARRIED_S)
        begin = waited_s - self._carried_s
        self._forget_before(begin)
        self._served = collections.deque(served - begin for served in self._served)

    def _forget_before(self, begin: float) -> None:
        while self._served and self._served[0] < begin:
            self._served.popleft()
