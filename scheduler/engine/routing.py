"""With data-parallel attention: which engine gets an event that does not name its engine.

Reports of ranks, and events of the control threads of a decode server, name it. A new prompt goes to the engine that
the balancer chooses. Later events of a request go to the engine that has the request.
"""

import abc
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic

from ...transfer.control.events import LoadReported, MessageReceived, PeerClosed, PeerLost, PeerUp
from ...transfer.protocol.messages import Abort, KvDestination, StageGrant
from ..decode.balancer import choose_for_submit, rebalance
from ..decode.scheduler import DecodeScheduler
from ..messages.frontend import Cancel, FlushCache, Submit
from ..prefill.request import TransferRef
from ..prefill.scheduler import PrefillScheduler
from .engine import SchedulerT


@dataclass(frozen=True, slots=True)
class ToEngine:
    """An event for one engine: data-parallel ranks of a decode server have connections of their own."""

    number: int
    event: object


class EventRouter(abc.ABC, Generic[SchedulerT]):
    """Chooses the engines of an event."""

    def __init__(self, schedulers: Sequence[SchedulerT]) -> None:
        self._schedulers = schedulers
        self._all = range(len(schedulers))

    @abc.abstractmethod
    def route(self, event: object) -> Sequence[int]:
        """The numbers of the engines that handle the event."""

    def rebalance(self, now: float) -> Collection[int]:  # noqa: ARG002
        """Move waiting prompts to other engines; returns the numbers of the engines that got some. On prefill no prompt
        moves: dispatch windows keep its queues short.
        """
        return ()


class DecodeRouter(EventRouter[DecodeScheduler]):
    """Events of the frontend of a decode server. The prompts of a call may go to several engines, which accept or
    refuse them together.
    """

    def __init__(self, schedulers: Sequence[DecodeScheduler]) -> None:
        super().__init__(schedulers)
        for scheduler in schedulers[1:]:
            scheduler.share_calls(schedulers[0])

    def route(self, event: object) -> Sequence[int]:
        if len(self._all) == 1:
            return self._all
        match event:
            case Submit():
                return (self._choose(event),)
            case Cancel(rid=rid):
                return [number for number in self._all if rid in self._schedulers[number].requests]
            case _:
                return self._all

    def rebalance(self, now: float) -> Collection[int]:
        return rebalance(self._schedulers, now) if len(self._all) > 1 else ()

    def _choose(self, submit: Submit) -> int:
        """A rid that is in use goes to the engine that has it, which refuses it."""
        for number, scheduler in enumerate(self._schedulers):
            if submit.rid in scheduler.requests:
                return number
        return choose_for_submit(self._schedulers, submit)


class PrefillRouter(EventRouter[PrefillScheduler]):
    """Events of the frontend and of the control thread of a prefill server."""

    def route(self, event: object) -> Sequence[int]:
        """Decode servers pair with all engines. If no engine has the transfer of an Abort or a grant, it has ended: the
        first one answers.
        """
        if len(self._all) == 1:
            return self._all
        match event:
            case MessageReceived(message=KvDestination(key=key), instance=instance, arrays=(prompt, *_)):
                known = self._holder((instance, key))
                # to make a list of a million integers takes 0.05 s
                tokens = array("i", prompt.tobytes())
                return (choose_for_prompt(self._schedulers, tokens) if known is None else known,)
            case MessageReceived(message=Abort(key=key), instance=instance):
                return (self._holder((instance, key)) or 0,)
            case MessageReceived(message=StageGrant(part=part), instance=instance):
                return (self._holder((instance, part.key)) or 0,)
            case PeerUp() | PeerLost() | PeerClosed() | LoadReported() | FlushCache():
                return self._all
            case _:
                return (0,)

    def _holder(self, ref: TransferRef) -> int | None:
        """The engine that has this transfer."""
        return next((number for number in self._all if ref in self._schedulers[number].requests), None)


def choose_for_prompt(schedulers: Sequence[PrefillScheduler], prompt: Sequence[int]) -> int:
    """The number of the scheduler that would have the fewest tokens to compute, including this prompt without the part
    that its cache has.
    """

    def key(number: int) -> tuple[int, int]:
        scheduler = schedulers[number]
        cached = len(scheduler.cache.match(prompt, len(prompt) - 1)) * scheduler.limits.page_size
        return scheduler.waiting_tokens - cached, scheduler.allocator.held

    return min(range(len(schedulers)), key=key)
