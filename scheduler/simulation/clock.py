"""The time of a simulation: events in order, and work that shares the cores of a machine."""

import heapq
import itertools
import math
from collections.abc import Callable

Event = Callable[[], None]


class Clock:
    """Events by time. `now` is the time of the event that runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()

    def at(self, time: float, event: Event) -> None:
        """Run `event` at `time`; events of the same time run in the order of these calls."""
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def after(self, seconds: float, event: Event) -> None:
        self.at(self.now + seconds, event)

    def run_next(self) -> bool:
        """Run the next event; False if there is none."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True


class Cores:
    """Runs work. With `cores`, pieces that need more cores than there are run slower, all by the same factor; without,
    each server has a device of its own.
    """

    def __init__(self, clock: Clock, cores: int | None) -> None:
        self._clock = clock
        self._cores = cores
        self._work: dict[int, tuple[float, int, Event]] = {}
        """Seconds that are left at full speed, cores that it uses, and what follows."""
        self._numbers = itertools.count()
        self._updated_at = 0.0
        self._version = 0

    def run(self, seconds: float, cores: int, done: Event) -> None:
        """Call `done` when work of `seconds` on `cores` cores has ended."""
        if self._cores is None:
            self._clock.after(seconds, done)
            return
        self._progress()
        self._work[next(self._numbers)] = (seconds, cores, done)
        self._plan()

    @property
    def _speed(self) -> float:
        wanted = sum(cores for _, cores, _ in self._work.values())
        return min(1.0, (self._cores or math.inf) / wanted) if wanted else 1.0

    def _progress(self) -> None:
        """Account for the time since the last change."""
        done_s = (self._clock.now - self._updated_at) * self._speed
        self._updated_at = self._clock.now
        self._work = {number: (left - done_s, cores, done) for number, (left, cores, done) in self._work.items()}

    def _plan(self) -> None:
        """Schedule the end of the piece that ends first, unless the set changes before."""
        self._version += 1
        if not self._work:
            return
        version = self._version
        number, (left, _, _) = min(self._work.items(), key=lambda item: item[1][0])
        self._clock.after(max(0.0, left) / self._speed, lambda: self._end(number, version))

    def _end(self, number: int, version: int) -> None:
        if version != self._version:
            return
        self._progress()
        _, _, done = self._work.pop(number)
        self._plan()
        done()
