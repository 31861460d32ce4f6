"""The engine loop: takes events, calls the schedulers, performs their effects, sends steps to the ranks. One thread.

Everything slow or blocking runs on other threads: sockets on the control and frontend threads, the model on the ranks.
They put events into the inbox. Only the loop's thread uses the schedulers and the allocators.
"""

import collections
import contextlib
import logging
import queue
import time
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from ...common.errors import PdserveError, ServerError
from ...common.stuck import ABSENCE_S
from ...common.words import counted
from ...transfer.protocol.messages import Load
from ..decode.responses import failed
from ..messages.effects import ConnectPeer, SendToFrontend, SendToPeer
from ..messages.frontend import Stop, ToFrontendBatch
from ..messages.ranks import AssistStep, CacheChecked, CheckCache, RankFailed, Report, RunStep, StepDone
from ..ranks.group import RankLostError, Ranks
from ..shutdown import LAST_WRITES_S
from .engine import Engine, joint_step, transfer_of
from .frontend_link import FrontendLink, UnsentError
from .routing import EventRouter, ToEngine
from .snapshot import Snapshot, total_load

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.1
"""Longest sleep of an idle loop; an event wakes it at once."""
EVENTS_S = 0.01
"""Longest time that a turn handles events before the ranks get their next step: to handle hundreds of long prompts at
once would take a second.
"""
SNAPSHOT_INTERVAL_S = 0.2
QUIET_S = 0.005
"""An idle loop publishes its state after this time without events. If it did so at once, it would hold the GIL while
other threads need it to send what the last event caused.
"""
FAILED_STEPS_UNTIL_UNHEALTHY = 3

EngineT = TypeVar("EngineT", bound=Engine[Any])  # of either role


class EngineLoop(Generic[EngineT]):
    """Drives the engines of a server: one, or one per data-parallel rank. `run()` returns after a Stop."""

    def __init__(
        self,
        engines: Sequence[EngineT],
        router: EventRouter[Any],
        frontend: FrontendLink,
        inbox: "queue.SimpleQueue[object]",
        ranks: Ranks,
    ) -> None:
        self.engines = engines
        self._router = router
        self._ranks = ranks
        self._lost: str | None = None
        self._step_seconds = 0.0
        self.turned_at = self._now = time.monotonic()
        self.snapshot = Snapshot({}, {}, {}, time.time())
        self.load = Load()
        """Of all engines; replaced as a whole."""
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
        self._idle_published = False
        """Whether the idle state has been published: until the next event, every SNAPSHOT_INTERVAL_S is enough."""
        self._failed_steps = 0
        self._leak: str | None = None

    def run(self) -> None:
        """Run until a Stop. If a rank is lost, fail all requests and raise RankLostError."""
        while not self._stopped():
            self._handle_events()
            if self._lost is None:
                self._turn()
            if self._lost is not None:
                self._stop_accepting()
                self._fail_all(f"the server lost a rank: {self._lost}", time.monotonic())
                raise RankLostError(self._lost)
            self._publish()
            self.turned_at = time.monotonic()

    def step_age_s(self) -> float:
        """How long the ranks have computed the current step; 0 if there is none. Called from any thread."""
        now = began = time.monotonic()
        for engine in self.engines:
            with contextlib.suppress(IndexError):  # the loop may take the last one at any time
                began = min(engine.steps_in_flight[0][0], began)
        return now - began

    def problems(self) -> list[str]:
        """Why this server is unhealthy, as text. Called from another thread."""
        found = [self._leak] if self._leak is not None else []
        if self._failed_steps >= FAILED_STEPS_UNTIL_UNHEALTHY:
            found.append(f"the last {self._failed_steps} model steps failed")
        return found + self._ranks.problems()

    def kv_store_problem(self) -> str | None:
        """Why the KV store is not used at present. Called from another thread."""
        stores = (engine.scheduler.kv_store for engine in self.engines)
        return next((store.breaker.problem for store in stores if store is not None and store.breaker.problem), None)

    def _turn(self) -> None:
        now = time.monotonic()
        absent_s, self._now = now - self._now, now
        for engine in self.engines:
            if absent_s > ABSENCE_S:  # this process was stopped or starved: even an idle loop turns more often
                engine.scheduler.resumed(absent_s, now)
            engine.scheduler.advance(now)
        for number in self._router.rebalance(now):
            self.engines[number].scheduler.advance(now)
        self._perform_effects()
        while self._lost is None and (steps := self._next_steps(now)):
            self._perform_effects()  # first: pages of retracted requests are saved before this step overwrites them
            if self._lost is not None:
                return
            for engine, step in zip(self.engines, steps, strict=True):
                with self._command(step):
                    engine.start(step, now)
        self._perform_effects()
        if not all(engine.scheduler.idle for engine in self.engines):
            self._checked_idle, self._busy_at, self._idle_published = False, now, False
        elif not self._checked_idle and now - self._busy_at >= IDLE_WAIT_S:
            self._check_idle()

    def _next_steps(self, now: float) -> Sequence[RunStep | AssistStep]:
        """The next step, as a command for each engine; empty if none can start now.

        Engines start their steps together, because their ranks exchange tokens in every layer. A step starts only when
        every engine can take one. Otherwise an engine whose results are late would miss the step and wait for the next.
        """
        if len(self.engines) == 1:
            step = self.engines[0].next_step(now)
            return [step] if step is not None else []
        if not all(engine.scheduler.may_start_step() for engine in self.engines):
            for engine in self.engines:
                engine.scheduler.use_waiting_time()
            return []
        steps = [engine.next_step(now) for engine in self.engines]
        return joint_step(steps) if any(step is not None for step in steps) else []

    def _handle_events(self) -> None:
        """Handle the events in the inbox, for EVENTS_S at most; wait up to IDLE_WAIT_S for the first. If an event
        raises, the others are handled nevertheless.
        """
        pause_s = max(engine.pause_s for engine in self.engines)
        event = None if self._idle_published else self._next_event(pause_s or QUIET_S)
        if event is None and not pause_s:
            if not self._idle_published:
                self._publish(force=True)
                self._idle_published = True
            event = self._next_event(IDLE_WAIT_S)
        if event is not None:
            self._idle_published = False
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
                        self._take_step(event)
                    case CacheChecked(rank=rank, problem=problem):
                        if problem is not None:
                            self._found_leak(f"rank {rank}: {problem}")
                    case _:
                        self._handle(event, time.monotonic())
            except Exception:
                log.exception("error while handling event %s", type(event).__name__)
                self.engines[0].scheduler.counters["event_errors"] += 1
            self._perform_effects()
            event = self._next_event(0.0) if time.monotonic() < ends_at else None

    def _next_event(self, wait_s: float) -> object | None:
        """The next event. Reports of ranks come first, so that a burst of events from peers and clients does not delay
        the next step.
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

    def _handle(self, event: object, now: float) -> None:
        match event:
            case Report():
                self._engine_of(event).handle(event, now)
            case ToEngine(number=number, event=own):
                self.engines[number].handle(own, now)
            case _:
                for number in self._router.route(event):
                    self.engines[number].handle(event, now)

    def _engine_of(self, report: Report) -> EngineT:
        """Ranks are numbered stage by stage, so engine i has every `len(engines)`-th rank from rank i on."""
        return self.engines[report.rank % len(self.engines)]

    def _perform_effects(self) -> None:
        """Perform what the schedulers have decided. A message that cannot be sent fails its request, and that has
        effects too.
        """
        while self._perform_once():
            pass

    def _perform_once(self) -> bool:
        """Whether a message could not be sent."""
        to_frontend: ToFrontendBatch = []
        unsent = False
        for engine in self.engines:
            for effect in engine.scheduler.take_effects():
                if isinstance(effect, SendToFrontend):
                    to_frontend.append(effect.message)
                    continue
                if isinstance(effect, SendToPeer | ConnectPeer):
                    unsent |= not self._perform_for_peer(engine, effect)
                else:
                    with self._command(effect):
                        engine.perform(effect)
        if to_frontend:
            unsent |= not self._send_to_frontend(to_frontend)
        return unsent

    @contextlib.contextmanager
    def _command(self, command: object) -> Iterator[None]:
        """A command that the ranks do not get ends the server: without it, their memory has other contents."""
        try:
            yield
        except Exception as error:
            log.exception("%s cannot be sent to the ranks", type(command).__name__)
            self._lost = self._lost or f"{type(command).__name__} cannot be sent to the ranks: {error}"

    def _perform_for_peer(self, engine: EngineT, effect: SendToPeer | ConnectPeer) -> bool:
        """Whether it was sent."""
        try:
            engine.perform(effect)
        except Exception as error:
            what = effect.message if isinstance(effect, SendToPeer) else effect
            reason = f"{type(what).__name__} cannot be sent: {error}"
            self._count_unsent(reason)
            if isinstance(effect, SendToPeer) and (key := transfer_of(effect.message)) is not None:
                engine.fail_transfer(effect.instance, key, reason, time.monotonic())
            return False
        return True

    def _send_to_frontend(self, messages: ToFrontendBatch) -> bool:
        """Whether all were sent."""
        try:
            self._frontend.send(*messages)
        except UnsentError as error:
            for rid, reason in error.reasons.items():
                self._count_unsent(reason)
                if not any(engine.fail_request(rid, reason, time.monotonic()) for engine in self.engines):
                    self._frontend.send(failed(rid, ServerError(reason)))  # it has ended, and its end was not sent
            return False
        return True

    def _count_unsent(self, reason: str) -> None:
        log.error("%s", reason)
        self.engines[0].scheduler.counters["effect_errors"] += 1

    def _begin_stop(self, drain_s: float) -> None:
        self._stop_accepting()
        self._stop_at = time.monotonic() + drain_s

    def _stop_accepting(self) -> None:
        for engine in self.engines:
            engine.scheduler.stop_accepting()

    def _fail_all(self, reason: str, now: float) -> None:
        for engine in self.engines:
            engine.scheduler.fail_all(reason, now)
        self._perform_effects()

    def _stopped(self) -> bool:
        if self._stop_at is None:
            return False
        now = time.monotonic()
        if now < self._stop_at:
            return all(engine.answered() for engine in self.engines)
        if not self._failed_all:
            self._failed_all = True
            if open_requests := sum(len(engine.scheduler.requests) for engine in self.engines):
                log.warning("drain deadline (shutdown_timeout_s): %s cut off", counted(open_requests, "request"))
            self._fail_all("the server was shut down before the request was done", now)
        return not any(engine.writes() for engine in self.engines) or now >= self._stop_at + LAST_WRITES_S

    def _take_step(self, done: StepDone) -> None:
        self._failed_steps = 0 if done.error is None else self._failed_steps + 1
        self._step_seconds = self._engine_of(done).take_step(done, time.monotonic())

    def _check_idle(self) -> None:
        """Check that every page is free and that the tables of the ranks are consistent. Runs once per idle period, and
        only after IDLE_WAIT_S: it takes milliseconds, which would delay the next request.
        """
        self._checked_idle = True
        self._leak = None
        for engine in self.engines:
            try:
                engine.scheduler.check_integrity()
            except (PdserveError, AssertionError) as error:
                self._found_leak(str(error))
        self._ranks.tell(CheckCache())
        self._publish(force=True)

    def _found_leak(self, problem: str) -> None:
        log.error("integrity check: %s", problem)
        self.engines[0].scheduler.counters["integrity_errors"] += 1
        self._publish(force=True)  # a Status with the problem has the count too
        self._leak = f"integrity check: {problem}"

    def _publish(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or now >= self._snapshot_at:
            self._snapshot_at = now + SNAPSHOT_INTERVAL_S
            for engine in self.engines:
                engine.load = engine.scheduler.load()
            self.load = total_load([engine.load for engine in self.engines])
            busy = {f"rank_{rank}_busy_seconds": busy_s for rank, busy_s in self._ranks.busy_seconds().items()}
            self.snapshot = Snapshot.of(
                [engine.scheduler for engine in self.engines],
                {**busy, "last_step_seconds": self._step_seconds},
                taken_at=time.time(),
            )
