"""One scheduler with its ranks and peers: all of a server or, with data-parallel attention, one data-parallel rank.

The engine loop (loop.py) has one engine per data-parallel rank, passes it its events, performs its effects and starts
steps for all engines together.
"""

import abc
import collections
import logging
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from ...common.words import counted
from ...models.config.sharding import RankTokens
from ...transfer.control.peers import AnyControl
from ...transfer.protocol.messages import (
    AnyMessage,
    ChunkArrived,
    InstanceId,
    KvDestination,
    Load,
    PrefillDone,
    StageArrived,
    StageFree,
    StageGrant,
    StageRequest,
    StageStopped,
    TransferKey,
)
from ...transfer.protocol.wire import Array
from ..decode.scheduler import DecodeScheduler
from ..messages.effects import ConnectPeer, Effect, SendToFrontend, SendToPeer
from ..messages.frontend import FlushCache
from ..messages.ranks import AssistStep, RunStep, StepDone
from ..messages.step import tokens_of
from ..prefill.scheduler import PrefillScheduler
from ..ranks.group import RankGroup

log = logging.getLogger(__name__)

SchedulerT = TypeVar("SchedulerT", bound=DecodeScheduler | PrefillScheduler)


class Engine(abc.ABC, Generic[SchedulerT]):
    """The common part of both roles."""

    def __init__(self, scheduler: SchedulerT, ranks: RankGroup, control: AnyControl) -> None:
        self.scheduler: SchedulerT = scheduler
        self._ranks = ranks
        self._control = control
        self.steps_in_flight: collections.deque[tuple[float, RunStep]] = collections.deque()
        """The steps that the ranks have, and when each began: when it was sent, or when the step before it was done."""
        self.last_step: tuple[RunStep, float] | None = None
        """The last step that is done, and how long it took; replaced as a whole."""
        self.load = Load()
        """Sent to peers with heartbeats; replaced as a whole."""

    def handle(self, event: object, now: float) -> None:
        """Pass one event to the scheduler."""
        if isinstance(event, FlushCache):
            log.info("prefix cache flushed: %s", counted(self.scheduler.flush_cache(), "page"))
        else:
            self.scheduler.handle(event, now)

    def perform(self, effect: Effect) -> None:
        """Perform one effect that is not for the frontend. Raises if it cannot be performed."""
        match effect:
            case SendToPeer(instance=instance, message=message, arrays=arrays):
                self._send(instance, message, *map(_array, arrays))
            case SendToFrontend() | ConnectPeer():
                raise TypeError(f"unexpected effect: {effect!r}")
            case _:
                self._ranks.tell(effect)

    def _send(self, instance: InstanceId, message: AnyMessage, *arrays: Array) -> None:
        """Send a message to a peer."""
        self._control.send(instance, message, *arrays)

    @abc.abstractmethod
    def fail_transfer(self, instance: InstanceId, key: TransferKey, reason: str, now: float) -> None:
        """Fail the transfer with this peer, and its requests."""

    @abc.abstractmethod
    def fail_request(self, rid: str, reason: str, now: float) -> bool:
        """Fail a request of a client; False if it is not open here."""

    @abc.abstractmethod
    def next_step(self, now: float) -> RunStep | None:
        """The next step for the ranks, if one can start now."""

    @abc.abstractmethod
    def answered(self) -> bool:
        """Whether every request has its terminal message."""

    @property
    def pause_s(self) -> float:
        """How long the next turn waits, if it has work without an event; else 0."""
        return 0.0

    def writes(self) -> bool:
        """Whether writes to peers are in flight (prefill): the peers wait for their end."""
        return False

    def start(self, step: RunStep | AssistStep, now: float) -> None:
        """Send a step to the ranks."""
        if isinstance(step, RunStep):
            self.steps_in_flight.append((now, step))
        self._ranks.tell(step)

    def take_step(self, done: StepDone, now: float) -> float:
        """Take the results of a step; returns how long it took."""
        started, step = self.steps_in_flight.popleft()
        if self.steps_in_flight:
            _, following = self.steps_in_flight[0]
            self.steps_in_flight[0] = now, following
        self.last_step = step, now - started
        if done.error is None:
            self.scheduler.step_done(done.command_id, done.results, now)
        else:
            self.scheduler.step_failed(done.command_id, done.error, now)
        return now - started


def _array(numbers: Sequence[int]) -> Array:
    return numbers if isinstance(numbers, bytes) else np.asarray(numbers, dtype=np.int32)


def transfer_of(message: AnyMessage) -> TransferKey | None:
    """The transfer that cannot go on without this message. None if it has ended, or if the message is about none."""
    match message:
        case KvDestination() | ChunkArrived() | PrefillDone():
            return message.key
        case StageRequest() | StageGrant() | StageArrived() | StageStopped() | StageFree():
            return message.part.key
        case _:
            return None


def joint_step(steps: Sequence[RunStep | None]) -> list[RunStep | AssistStep]:
    """The commands of one step for several data-parallel ranks, from the step of each. Every command has the numbers of
    tokens of all ranks. A rank without rows gets an AssistStep: it computes experts for the tokens of the others.
    """
    ranks = tuple(tokens_of(step.rows) if step is not None else RankTokens(0, 0) for step in steps)
    return [AssistStep(ranks) if step is None else RunStep(step.command_id, step.rows, ranks) for step in steps]
