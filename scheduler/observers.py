"""HTTP legs on a prefill server that wait to see how the transfer of their room ends (a router posts to both sides)."""

import collections
import dataclasses
from collections.abc import Callable

from ..configs.errors import AbortedError, DeadlineError, DuplicateRequestError, RequestError
from .front import Failed, Finished, FinishReason, ToFront, Tokens

REMEMBERED_ROOMS = 1024
"""Ended transfers whose outcome a leg that comes late may still ask for."""


@dataclasses.dataclass(frozen=True, slots=True)
class TransferSummary:
    """What an observer is told of a transfer that succeeded."""

    first_token: int
    prompt_tokens: int
    cached_tokens: int


Outcome = TransferSummary | RequestError


@dataclasses.dataclass(slots=True)
class Observer:
    rid: str
    room: int
    deadline: float


class Observers:
    """Who waits for which room. Methods return the messages to send to the front: one answer per observer."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._observers: dict[str, Observer] = {}
        self._by_room: dict[int, list[Observer]] = {}
        self._by_deadline: collections.deque[Observer] = collections.deque()
        """Those whose room was not under way when we looked last, and some that have their answer."""
        self._outcomes: collections.OrderedDict[int, Outcome] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._observers)

    def add(self, rid: str, room: int, now: float) -> list[ToFront]:
        if rid in self._observers:
            return _answer(rid, DuplicateRequestError(f"rid: {rid!r} is already waiting; choose another"))
        outcome = self._outcomes.get(room)
        if outcome is not None:
            return _answer(rid, outcome)
        observer = Observer(rid, room, now + self._timeout_s)
        self._observers[rid] = observer
        self._by_room.setdefault(room, []).append(observer)
        self._by_deadline.append(observer)
        return []

    def cancel(self, rid: str) -> tuple[list[ToFront], int | None]:
        """Its client has gone; also returns the room it waited for."""
        observer = self._observers.get(rid)
        if observer is None:
            return [], None
        self._remove(observer)
        return _answer(rid, AbortedError("the client aborted the request")), observer.room

    def settle(self, room: int | None, outcome: Outcome) -> list[ToFront]:
        """The transfer of `room` has ended."""
        if room is None:
            return []
        self._outcomes[room] = outcome
        self._outcomes.move_to_end(room)
        while len(self._outcomes) > REMEMBERED_ROOMS:
            self._outcomes.popitem(last=False)
        messages: list[ToFront] = []
        for observer in self._by_room.pop(room, []):
            del self._observers[observer.rid]
            messages += _answer(observer.rid, outcome)
        return messages

    def expire(self, under_way: Callable[[int], bool], now: float) -> list[ToFront]:
        """Answer those whose room nobody asked for in time. Rooms `under_way` have the deadline of their transfer, with
        whose end they are answered.
        """
        messages: list[ToFront] = []
        while self._by_deadline and self._by_deadline[0].deadline <= now:
            observer = self._by_deadline.popleft()
            if self._observers.get(observer.rid) is observer and not under_way(observer.room):
                self._remove(observer)
                error = f"bootstrap_room {observer.room}: no decode server asked for it in {self._timeout_s:g} s"
                messages += _answer(observer.rid, DeadlineError(error))
        return messages

    def _remove(self, observer: Observer) -> None:
        del self._observers[observer.rid]
        of_room = self._by_room[observer.room]
        of_room.remove(observer)
        if not of_room:
            del self._by_room[observer.room]


def _answer(rid: str, outcome: Outcome) -> list[ToFront]:
    if isinstance(outcome, RequestError):
        return [Failed(rid, outcome.status, outcome.code, str(outcome))]
    return [
        Tokens(rid, (outcome.first_token,)),
        Finished(
            rid=rid,
            reason=FinishReason("length", length=1),
            prompt_tokens=outcome.prompt_tokens,
            completion_tokens=1,
            cached_tokens=outcome.cached_tokens,
            timeline={},
        ),
    ]
