"""The engine loop: takes what happened, lets the scheduler decide, tells the ranks what to do. One thread.

Everything slow or blocking is elsewhere: sockets on the control and front threads, the model on the ranks. They put
events into the inbox; this thread is the only one that touches the scheduler and the allocators.
"""

import abc
import collections
import contextlib
import dataclasses
import logging
import queue
import time
from collections.abc import Mapping
from typing import Generic, TypeVar

from ...configs.errors import PdserveError
from ...transfer.protocol.messages import Load
from ..decode.scheduler import DecodeScheduler
from ..messages.effects import Effect, SendToFrontend
from ..messages.frontend import Stop, ToFrontendBatch
from ..messages.ranks import CacheChecked, CheckCache, RankFailed, Report, RunStep, StepDone
from ..prefill.scheduler import PrefillScheduler
from ..ranks.group import RankLostError, Ranks
from ..shutdown import LAST_WRITES_S
from .frontend_link import FrontendLink

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.1
"""How long an idle loop sleeps before it looks at the clock again; an event wakes it at once."""
EVENTS_S = 0.01
"""How long events are handled before the ranks get their next step: hundreds of long prompts at once would keep them
waiting for a second."""
SNAPSHOT_INTERVAL_S = 0.2
FAILED_STEPS_UNTIL_UNHEALTHY = 3

SchedulerT = TypeVar("SchedulerT", bound=DecodeScheduler | PrefillScheduler)


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """What other threads may see of the engine: replaced as a whole, never changed."""

    gauges: Mapping[str, float]
    counters: Mapping[str, float]
    states: Mapping[str, int]
    taken_at: float
    """Unix time, which the front shows to those who ask it."""


class EngineLoop(abc.ABC, Generic[SchedulerT]):
    """What the two roles share. `run()` returns when a Stop has been carried out."""

    def __init__(
        self,
        scheduler: SchedulerT,
        frontend: FrontendLink,
        inbox: "queue.SimpleQueue[object]",
        ranks: Ranks,
        world_size: int,
    ) -> None:
        self.scheduler: SchedulerT = scheduler
        self._ranks = ranks
        self._world_size = world_size
        self._given: collections.deque[float] = collections.deque()
        """When each step under way was given."""
        self._lost: str | None = None
        self._step_seconds = 0.0
        self.turned_at = time.monotonic()
        self.snapshot = Snapshot({}, {}, {}, time.time())
        self.load = Load()
        """What heartbeats tell our peers; replaced as a whole."""
        self._frontend = frontend
        self._inbox = inbox
        self._reports: collections.deque[Report] = collections.deque()
        self._others: collections.deque[object] = collections.deque()
        """What was taken from the inbox and has not been handled."""
        self._stop_at: float | None = None
        self._gave_up = False
        self._snapshot_at = 0.0
        self._checked_idle = False
        self._busy_at = 0.0
        self._failed_steps = 0
        self._leak: str | None = None

    def run(self) -> None:
        """Raises RankLostError, after everybody has been answered, when a rank is lost."""
        while not self._stopped():
            self._handle_events(IDLE_WAIT_S)
            if self._lost is not None:
                self.scheduler.stop_accepting()
                self._give_up(f"the server lost a rank: {self._lost}", time.monotonic())
                self._carry_out()
                raise RankLostError(self._lost)
            self._turn()
            self._publish(force=not self._given)
            self.turned_at = time.monotonic()

    def stalled_s(self) -> float:
        """How long nothing has moved: the loop has not turned, or a step has been under way. Called from any thread."""
        try:
            oldest = min(self._given[0], self.turned_at)
        except IndexError:
            oldest = self.turned_at
        return time.monotonic() - oldest

    def problems(self) -> list[str]:
        """What makes this server unhealthy, in words. Called from another thread."""
        found = [self._leak] if self._leak is not None else []
        if self._failed_steps >= FAILED_STEPS_UNTIL_UNHEALTHY:
            found.append(f"the last {self._failed_steps} model steps failed")
        return found + self._ranks.problems()

    @abc.abstractmethod
    def _handle(self, event: object, now: float) -> None:
        """Tell the scheduler about one event."""

    @abc.abstractmethod
    def _perform(self, effect: Effect) -> None:
        """Carry out one effect that is not for the front."""

    @abc.abstractmethod
    def _next_step(self, now: float) -> RunStep | None:
        """The next step for the ranks, if there is one to give."""

    @abc.abstractmethod
    def _step_done(self, done: StepDone, now: float) -> None:
        """Tell the scheduler how a step has ended."""

    @abc.abstractmethod
    def _gauges(self) -> dict[str, float]:
        """Numbers of this role for the snapshot."""

    @abc.abstractmethod
    def _give_up(self, reason: str, now: float) -> None:
        """End every request with this answer."""

    @abc.abstractmethod
    def _answered(self) -> bool:
        """Every client and peer has its terminal answer."""

    @abc.abstractmethod
    def _writes(self) -> bool:
        """Something is being written into the memory of peers, who are told when that has ended."""

    def _turn(self) -> None:
        now = time.monotonic()
        self.scheduler.advance(now)
        self._carry_out()
        while (step := self._next_step(now)) is not None:
            self._carry_out()  # pages that were retracted are saved before somebody else writes them
            self._given.append(now)
            self._ranks.tell(step)
        self._carry_out()
        if not self.scheduler.idle:
            self._checked_idle, self._busy_at = False, now
        elif not self._checked_idle and now - self._busy_at >= IDLE_WAIT_S:
            self._check_idle()

    def _handle_events(self, wait_s: float) -> None:
        """What is in the inbox, for EVENTS_S at most; waits up to `wait_s` for the first. One bad event does not stop
        the others.
        """
        event = self._next_event(wait_s)
        ends_at = time.monotonic() + EVENTS_S
        while event is not None:
            try:
                match event:
                    case Stop(drain_s=drain_s):
                        self._begin_stop(drain_s)
                    case RankFailed(rank=rank, reason=reason):
                        log.error("rank %d: %s", rank, reason)
                        self._lost = self._lost or reason
                    case StepDone():
                        self._take_step(event, time.monotonic())
                    case CacheChecked(rank=rank, problem=problem):
                        if problem is not None:
                            self._found_leak(f"rank {rank}: {problem}")
                    case _:
                        self._handle(event, time.monotonic())
            except Exception:
                log.exception("event %s", type(event).__name__)
                self.scheduler.counters["event_errors"] += 1
            self._carry_out()
            event = self._next_event(0.0) if time.monotonic() < ends_at else None

    def _next_event(self, wait_s: float) -> object | None:
        """The next one to handle: what ranks report before what peers and clients say, a burst of which would otherwise
        stand between a step that is done and the next one.
        """
        with contextlib.suppress(queue.Empty):
            event = self._inbox.get(timeout=0.0 if self._reports or self._others else wait_s)
            while True:
                if isinstance(event, Report):
                    self._reports.append(event)
                else:
                    self._others.append(event)
                event = self._inbox.get_nowait()
        waiting = self._reports or self._others
        return waiting.popleft() if waiting else None

    def _carry_out(self) -> None:
        to_frontend: ToFrontendBatch = []
        for effect in self.scheduler.take_effects():
            if isinstance(effect, SendToFrontend):
                to_frontend.append(effect.message)
            else:
                self._perform(effect)
        if to_frontend:
            self._frontend.send(*to_frontend)

    def _begin_stop(self, drain_s: float) -> None:
        self.scheduler.stop_accepting()
        self._stop_at = time.monotonic() + drain_s

    def _stopped(self) -> bool:
        if self._stop_at is None:
            return False
        now = time.monotonic()
        if now < self._stop_at:
            return self._answered()
        if not self._gave_up:
            self._gave_up = True
            self._give_up("the server was shut down before the request was done", now)
            self._carry_out()
        return not self._writes() or now >= self._stop_at + LAST_WRITES_S

    def _take_step(self, done: StepDone, now: float) -> None:
        self._step_seconds = now - self._given.popleft()
        self._failed_steps = 0 if done.error is None else self._failed_steps + 1
        self._step_done(done, now)

    def _check_idle(self) -> None:
        """With nothing to do, every page must be home, and every table of the ranks sound. Looked at once, and not in
        the moment between two requests: the check takes milliseconds, which the second would wait for.
        """
        self._checked_idle = True
        self._leak = None
        try:
            self.scheduler.check_integrity()
        except (PdserveError, AssertionError) as error:
            self._found_leak(str(error))
        self._ranks.tell(CheckCache())

    def _found_leak(self, problem: str) -> None:
        log.error("integrity check: %s", problem)
        self.scheduler.counters["integrity_errors"] += 1
        self._leak = f"integrity check: {problem}"

    def _publish(self, *, force: bool) -> None:
        now = time.monotonic()
        if force or now >= self._snapshot_at:
            self._snapshot_at = now + SNAPSHOT_INTERVAL_S
            self.load = self.scheduler.load()
            pages = self.scheduler.pages
            gauges = {"kv_pages": pages.num_pages, "kv_pages_held": pages.held, "kv_pages_available": pages.available}
            busy = {f"rank_{rank}_busy_seconds": busy_s for rank, busy_s in self._ranks.busy_seconds().items()}
            self.snapshot = Snapshot(
                gauges={**gauges, **busy, "last_step_seconds": self._step_seconds, **self._gauges()},
                counters=dict(self.scheduler.counters),
                states=self.scheduler.state_counts(),
                taken_at=time.time(),
            )
