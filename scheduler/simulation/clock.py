"""The time of a simulation: events in order, and work that shares the cores of a machine."""

import dataclasses
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


@dataclasses.dataclass
class _Work:
    """Seconds that are left at full speed, cores that it uses, its slowdown beside other work, and what follows."""

    left_s: float
    cores: int
    slowdown: float
    done: Event


class Cores:
    """Runs work. With `cores`, pieces that need more cores than there are run slower, all by the same factor, and a
    piece beside others runs slower by its own factor: they share caches and memory bandwidth. Without `cores`, each
    server has a device of its own.
    """

    def __init__(self, clock: Clock, cores: int | None) -> None:
        self._clock = clock
        self._cores = cores
        self._work: dict[int, _Work] = {}
        self._numbers = itertools.count()
        self._updated_at = 0.0
        self._version = 0

    def run(self, seconds: float, cores: int, done: Event, *, slowdown: float = 1.0) -> None:
        """Call `done` when work of `seconds` on `cores` cores has ended; beside other work it takes `slowdown` times as
        long.
        """
        if self._cores is None:
            self._clock.after(seconds, done)
            return
        self._progress()
        self._work[next(self._numbers)] = _Work(seconds, cores, slowdown, done)
        self._plan()

    def _speed(self, work: "_Work") -> float:
        if len(self._work) == 1:
            return min(1.0, (self._cores or math.inf) / work.cores)
        wanted = sum(each.cores for each in self._work.values())
        return min(1.0, (self._cores or math.inf) / wanted) / work.slowdown

    def _progress(self) -> None:
        """Account for the time since the last change."""
        passed_s = self._clock.now - self._updated_at
        self._updated_at = self._clock.now
        for work in self._work.values():
            work.left_s -= passed_s * self._speed(work)

    def _plan(self) -> None:
        """Schedule the end of the piece that ends first, unless the set changes before."""
        self._version += 1
        if not self._work:
            return
        version = self._version
        after_s, number = min(
            (max(0.0, work.left_s) / self._speed(work), number) for number, work in self._work.items()
        )
        self._clock.after(after_s, lambda: self._end(number, version))

    def _end(self, number: int, version: int) -> None:
        if version != self._version:
            return
        self._progress()
        done = self._work.pop(number).done
        self._plan()
        done()
