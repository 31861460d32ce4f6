"""Nobody starves in a queue: what MAX_OVERTAKES others have overtaken is next (`Overtakes`).

`FairQueue` is a queue of prompts that wait for pages or for the next step: by priority, then by arrival.
"""

import bisect
import collections
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, Protocol, TypeVar

MAX_OVERTAKES = 16
"""In every queue of the schedulers: how often others may overtake a request until it is its turn."""
MAX_MISFITS = 8
"""A turn stops after this many requests that find no pages."""


class Prioritized(Hashable, Protocol):
    """What has a priority; larger numbers first."""

    @property
    def priority(self) -> int: ...


T = TypeVar("T", bound=Prioritized)
WaitingT = TypeVar("WaitingT", bound=Hashable)


class Overtakes(dict[WaitingT, tuple[int, int]]):
    """For each in a queue that was overtaken, because another one got what it waits for: how often, and the highest
    priority among those that did. Whoever has its turn, or does not wait any more, is removed.
    """

    def add(self, waiting: WaitingT, priority: int) -> int | None:
        """One of this priority has overtaken it. If it is due now, returns the highest priority among those that did,
        which it gets.
        """
        times, highest = self.get(waiting, (0, priority))
        self[waiting] = times, highest = times + 1, max(highest, priority)
        return highest if times >= MAX_OVERTAKES else None

    def is_due(self, waiting: WaitingT) -> bool:
        """Whether it has been overtaken often enough: it is next."""
        return waiting in self and self[waiting][0] >= MAX_OVERTAKES


class FairQueue(Generic[T]):
    """Requests in the order of precedence."""

    def __init__(self) -> None:
        self._in_order: list[T] = []
        self._by_arrival: collections.OrderedDict[T, None] = collections.OrderedDict()
        self._overtakes: Overtakes[T] = Overtakes()
        """Of the oldest request, by turns of others since it had a turn, or became the oldest."""

    def __len__(self) -> int:
        return len(self._in_order)

    def __contains__(self, request: T) -> bool:
        return request in self._by_arrival

    def __iter__(self) -> Iterator[T]:
        """Iterates in the order of turns, which only `turn`, `push` and `remove` change."""
        if not self.oldest_is_due:
            yield from self._in_order
            return
        oldest = self._oldest
        yield oldest
        yield from (request for request in self._in_order if request is not oldest)

    @property
    def oldest_is_due(self) -> bool:
        """Others have overtaken the oldest often enough: it comes first, whatever its priority."""
        return bool(self._overtakes) and self._overtakes.is_due(self._oldest)

    @property
    def first(self) -> T:
        """The next request; the queue is not empty."""
        return next(iter(self))

    def push(self, request: T) -> None:
        self._by_arrival[request] = None
        bisect.insort(self._in_order, request, key=_precedence)

    def turn(self, requests: Collection[T]) -> None:
        """These requests had a turn, and stay in the queue."""
        oldest = self._oldest
        if oldest in requests:
            self._overtakes.pop(oldest, None)
        else:
            self._overtakes.add(oldest, oldest.priority)

    def take(self, request: T) -> None:
        """Remove a request that has its turn."""
        self.turn((request,))
        self.remove(request)

    def remove(self, request: T) -> None:
        """Remove a request, which has to be in the queue."""
        self._overtakes.pop(request, None)
        del self._by_arrival[request]
        first = bisect.bisect_left(self._in_order, _precedence(request), key=_precedence)
        del self._in_order[self._in_order.index(request, first)]

    @property
    def _oldest(self) -> T:
        return next(iter(self._by_arrival))


def _precedence(request: Prioritized) -> int:
    return -request.priority
