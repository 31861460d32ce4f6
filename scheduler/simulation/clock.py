"""The time of a simulation: events in order, and steps that share the cores of a machine."""

import dataclasses
import heapq
import itertools
from collections.abc import Callable

from .step_times import Role, StepTimes

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
    """A step: the server's role, seconds that are left at full speed, cores that it uses, and what follows."""

    role: Role
    left_s: float
    cores: int
    done: Event


class Cores:
    """Runs steps. With `cores`, all servers share a machine: while steps want more cores than there are, each gets the
    same part of what it wants, and interference (`step_times.py`) slows it down further. Without `cores`, each server
    has a device of its own.
    """

    def __init__(self, clock: Clock, cores: int | None, times: StepTimes) -> None:
        self._clock = clock
        self._cores = cores
        self._times = times
        self._work: dict[int, _Work] = {}
        self._speeds: dict[Role, float] = {}
        self._numbers = itertools.count()
        self._updated_at = 0.0
        self._version = 0

    def run(self, role: Role, seconds: float, cores: int, done: Event) -> None:
        """Call `done` when a step has ended that alone on the machine takes `seconds` on `cores` cores."""
        if self._cores is None:
            self._clock.after(seconds, done)
            return
        self._progress()
        self._work[next(self._numbers)] = _Work(role, seconds, cores, done)
        self._plan()

    def _progress(self) -> None:
        """Account for the time since the last change."""
        passed_s = self._clock.now - self._updated_at
        self._updated_at = self._clock.now
        for work in self._work.values():
            work.left_s -= passed_s * self._speeds[work.role]

    def _plan(self) -> None:
        """Set the speeds and schedule the end of the step that ends first, unless the set changes before."""
        self._version += 1
        if not self._work:
            return
        self._speeds = self._current_speeds()
        version = self._version
        after_s, number = min(
            (max(0.0, work.left_s) / self._speeds[work.role], number) for number, work in self._work.items()
        )
        self._clock.after(after_s, lambda: self._end(number, version))

    def _current_speeds(self) -> dict[Role, float]:
        assert self._cores is not None, "only steps that share cores are planned"
        share = min(1.0, self._cores / sum(work.cores for work in self._work.values()))
        roles = [work.role for work in self._work.values()]
        computing = roles.count("prefill"), roles.count("decode")
        return {role: share / self._times.interference_factor(role, *computing) for role in roles}

    def _end(self, number: int, version: int) -> None:
        if version != self._version:
            return
        self._progress()
        done = self._work.pop(number).done
        self._plan()
        done()
