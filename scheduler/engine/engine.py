"""One scheduler with its ranks and peers: all of a server or, with data-parallel attention, one data-parallel rank.

The engine loop (loop.py) has one engine per data-parallel rank, passes it its events, performs its effects and starts
steps for all engines together.
"""

import abc
import collections
from collections.abc import Sequence
from typing import Generic, TypeVar

from ...models.config.sharding import RankTokens
from ...transfer.protocol.messages import Load
from ..decode.scheduler import DecodeScheduler
from ..messages.effects import Effect
from ..messages.ranks import AssistStep, RunStep, StepDone, StorePinged, StoreWritten
from ..messages.step import tokens_of
from ..prefill.scheduler import PrefillScheduler
from ..ranks.group import RankGroup

SchedulerT = TypeVar("SchedulerT", bound=DecodeScheduler | PrefillScheduler)


class Engine(abc.ABC, Generic[SchedulerT]):
    """The common part of both roles."""

    def __init__(self, scheduler: SchedulerT, ranks: RankGroup) -> None:
        self.scheduler: SchedulerT = scheduler
        self._ranks = ranks
        self.steps_in_flight: collections.deque[tuple[float, RunStep]] = collections.deque()
        """The steps that the ranks have, and when each began: when it was sent, or when the step before it was done."""
        self.last_step: tuple[RunStep, float] | None = None
        """The last step that is done, and how long it took; replaced as a whole."""
        self.load = Load()
        """Sent to peers with heartbeats; replaced as a whole."""

    @abc.abstractmethod
    def handle(self, event: object, now: float) -> None:
        """Pass one event to the scheduler."""

    @abc.abstractmethod
    def release_held(self, now: float) -> None:
        """Pass requests that wait for their grammar to the scheduler, which refuses them now."""

    @abc.abstractmethod
    def perform(self, effect: Effect) -> None:
        """Perform one effect that is not for the frontend."""

    @abc.abstractmethod
    def next_step(self, now: float) -> RunStep | None:
        """The next step for the ranks, if one can start now."""

    @abc.abstractmethod
    def _step_done(self, done: StepDone, now: float) -> None:
        """Pass the result of a step to the scheduler."""

    @abc.abstractmethod
    def answered(self) -> bool:
        """Whether every request has its terminal message."""

    @abc.abstractmethod
    def writes(self) -> bool:
        """Whether writes to peers are in flight: the peers wait for their end."""

    def start(self, step: RunStep | AssistStep, now: float) -> None:
        """Send a step to the ranks."""
        if isinstance(step, RunStep):
            self.steps_in_flight.append((now, step))
        self._ranks.tell(step)

    def _store_report(self, report: StoreWritten | StorePinged, now: float) -> None:
        """Pass a report about the KV store to it."""
        store = self.scheduler.kv_store
        assert store is not None, f"{type(report).__name__} without a KV store"
        if isinstance(report, StoreWritten):
            store.written(report, now)
        else:
            store.pinged(report, now)

    def take_step(self, done: StepDone, now: float) -> float:
        """Take the results of a step; returns how long it took."""
        started, step = self.steps_in_flight.popleft()
        if self.steps_in_flight:
            _, following = self.steps_in_flight[0]
            self.steps_in_flight[0] = now, following
        self.last_step = step, now - started
        self._step_done(done, now)
        return now - started


def joint_step(steps: Sequence[RunStep | None]) -> list[RunStep | AssistStep]:
    """The parts of a step of several data-parallel ranks: each has the tokens of all ranks, and a rank without rows
    assists the others.
    """
    ranks = tuple(tokens_of(step.rows) if step is not None else RankTokens(0, 0) for step in steps)
    return [AssistStep(ranks) if step is None else RunStep(step.command_id, step.rows, ranks) for step in steps]
