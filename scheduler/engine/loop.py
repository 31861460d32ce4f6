"""The engine loop: takes events, calls the scheduler, performs its effects, sends steps to the ranks. One thread.

Everything slow or blocking runs on other threads: sockets on the control and frontend threads, the model on the ranks.
They put events into the inbox. Only the loop's thread uses the scheduler and the allocators.
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
"""Longest sleep of an idle loop; an event wakes it at once."""
EVENTS_S = 0.01
"""Longest time for events before the ranks get their next step: hundreds of long prompts at once would take a second.
"""
SNAPSHOT_INTERVAL_S = 0.2
QUIET_S = 0.005
"""An idle loop publishes its state after this time without events. At once, it would delay the threads that send what
the last event caused: they need the GIL.
"""
FAILED_STEPS_UNTIL_UNHEALTHY = 3

SchedulerT = TypeVar("SchedulerT", bound=DecodeScheduler | PrefillScheduler)


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """State of the engine for other threads: replaced as a whole, never modified."""

    gauges: Mapping[str, float]
    counters: Mapping[str, float]
    states: Mapping[str, int]
    taken_at: float
    """Unix time."""


class EngineLoop(abc.ABC, Generic[SchedulerT]):
    """The common part of both roles. `run()` returns after a Stop."""

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
        self._step_starts: collections.deque[float] = collections.deque()
        """When each step in flight was sent to the ranks."""
        self._lost: str | None = None
        self._step_seconds = 0.0
        self.turned_at = time.monotonic()
        self.snapshot = Snapshot({}, {}, {}, time.time())
        self.load = Load()
        """Sent to peers with heartbeats; replaced as a whole."""
        self._frontend = frontend
        self._inbox = inbox
        self._reports: collections.deque[Report] = collections.deque()
        self._others: collections.deque[object] = collections.deque()
        """Taken from the inbox, but not handled yet."""
        self._stop_at: float | None = None
        self._failed_all = False
        self._snapshot_at = 0.0
        self._checked_idle = False
        self._busy_at = 0.0
        self._failed_steps = 0
        self._leak: str | None = None

    def run(self) -> None:
        """Run until a Stop. If a rank is lost, fail all requests and raise RankLostError."""
        while not self._stopped():
            self._handle_events()
            if self._lost is not None:
                self.scheduler.stop_accepting()
                self._release_held(time.monotonic())
                self.scheduler.fail_all(f"the server lost a rank: {self._lost}", time.monotonic())
                self._perform_effects()
                raise RankLostError(self._lost)
            self._turn()
            self._publish()
            self.turned_at = time.monotonic()

    def stalled_s(self) -> float:
        """Age of the last loop turn or of the oldest step in flight, whichever is older. Called from any thread."""
        try:
            oldest = min(self._step_starts[0], self.turned_at)
        except IndexError:
            oldest = self.turned_at
        return time.monotonic() - oldest

    def problems(self) -> list[str]:
        """Why this server is unhealthy, as text. Called from another thread."""
        found = [self._leak] if self._leak is not None else []
        if self._failed_steps >= FAILED_STEPS_UNTIL_UNHEALTHY:
            found.append(f"the last {self._failed_steps} model steps failed")
        return found + self._ranks.problems()

    @abc.abstractmethod
    def _handle(self, event: object, now: float) -> None:
        """Pass one event to the scheduler."""

    @abc.abstractmethod
    def _release_held(self, now: float) -> None:
        """Pass requests that wait for their grammar to the scheduler, which refuses them now."""

    @abc.abstractmethod
    def _perform(self, effect: Effect) -> None:
        """Perform one effect that is not for the frontend."""

    @abc.abstractmethod
    def _next_step(self, now: float) -> RunStep | None:
        """The next step for the ranks, if one can start now."""

    @abc.abstractmethod
    def _step_done(self, done: StepDone, now: float) -> None:
        """Pass the result of a step to the scheduler."""

    @abc.abstractmethod
    def _answered(self) -> bool:
        """Whether every request has its terminal message."""

    @abc.abstractmethod
    def _writes(self) -> bool:
        """Whether writes to peers are in flight, whose end the peers wait for."""

    def _turn(self) -> None:
        now = time.monotonic()
        self.scheduler.advance(now)
        self._perform_effects()
        while (step := self._next_step(now)) is not None:
            self._perform_effects()  # pages of retracted requests are saved before this step writes them
            self._step_starts.append(now)
            self._ranks.tell(step)
        self._perform_effects()
        if not self.scheduler.idle:
            self._checked_idle, self._busy_at = False, now
        elif not self._checked_idle and now - self._busy_at >= IDLE_WAIT_S:
            self._check_idle()

    def _handle_events(self) -> None:
        """Handle the events in the inbox, for EVENTS_S at most; wait up to IDLE_WAIT_S for the first. An event that
        raises does not stop the others.
        """
        event = self._next_event(QUIET_S)
        if event is None:
            self._publish(force=True)
            event = self._next_event(IDLE_WAIT_S)
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
                log.exception("error while handling event %s", type(event).__name__)
                self.scheduler.counters["event_errors"] += 1
            self._perform_effects()
            event = self._next_event(0.0) if time.monotonic() < ends_at else None

    def _next_event(self, wait_s: float) -> object | None:
        """The next event. Reports of ranks come before events of peers and clients, so that a burst of those does not
        delay the next step.
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

    def _perform_effects(self) -> None:
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
        self._release_held(time.monotonic())
        self._stop_at = time.monotonic() + drain_s

    def _stopped(self) -> bool:
        if self._stop_at is None:
            return False
        now = time.monotonic()
        if now < self._stop_at:
            return self._answered()
        if not self._failed_all:
            self._failed_all = True
            self.scheduler.fail_all("the server was shut down before the request was done", now)
            self._perform_effects()
        return not self._writes() or now >= self._stop_at + LAST_WRITES_S

    def _take_step(self, done: StepDone, now: float) -> None:
        self._step_seconds = now - self._step_starts.popleft()
        self._failed_steps = 0 if done.error is None else self._failed_steps + 1
        self._step_done(done, now)

    def _check_idle(self) -> None:
        """Check that every page is free and that the tables of the ranks are consistent. Runs once per idle period, and
        only after IDLE_WAIT_S: it takes milliseconds, which would delay the next request.
        """
        self._checked_idle = True
        self._leak = None
        try:
            self.scheduler.check_integrity()
        except (PdserveError, AssertionError) as error:
            self._found_leak(str(error))
        self._ranks.tell(CheckCache())
        self._publish(force=True)

    def _found_leak(self, problem: str) -> None:
        log.error("integrity check: %s", problem)
        self.scheduler.counters["integrity_errors"] += 1
        self._leak = f"integrity check: {problem}"

    def _publish(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or now >= self._snapshot_at:
            self._snapshot_at = now + SNAPSHOT_INTERVAL_S
            self.load = self.scheduler.load()
            pages = self.scheduler.pages
            gauges = {"kv_pages": pages.num_pages, "kv_pages_held": pages.held, "kv_pages_available": pages.available}
            busy = {f"rank_{rank}_busy_seconds": busy_s for rank, busy_s in self._ranks.busy_seconds().items()}
            self.snapshot = Snapshot(
                gauges={**gauges, **busy, "last_step_seconds": self._step_seconds, **self.scheduler.gauges()},
                counters=dict(self.scheduler.counters),
                states=self.scheduler.state_counts(),
                taken_at=time.time(),
            )
