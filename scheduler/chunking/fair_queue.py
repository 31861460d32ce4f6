"""A queue of prompts that wait for pages or for the next step: by priority, then by arrival. The oldest prompt gets a
turn after MAX_OVERTAKES turns of others. Queues that keep another order have `Ageing` instead.
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


class FairQueue(Generic[T]):
    """Requests in the order of precedence."""

    def __init__(self) -> None:
        self._in_order: list[T] = []
        self._by_arrival: collections.OrderedDict[T, None] = collections.OrderedDict()
        self._overtaken = 0
        """Turns of other requests since the oldest one had a turn, or became the oldest."""

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
        return self._overtaken >= MAX_OVERTAKES

    @property
    def first(self) -> T:
        """The next request; the queue is not empty."""
        return next(iter(self))

    def push(self, request: T) -> None:
        self._by_arrival[request] = None
        bisect.insort(self._in_order, request, key=_precedence)

    def turn(self, requests: Collection[T]) -> None:
        """These requests had a turn, and stay in the queue."""
        self._overtaken = 0 if self._oldest in requests else self._overtaken + 1

    def take(self, request: T) -> None:
        """Remove a request that has its turn."""
        self.turn((request,))
        self.remove(request)

    def remove(self, request: T) -> None:
        """Remove a request, which has to be in the queue."""
        if request is self._oldest:
            self._overtaken = 0
        del self._by_arrival[request]
        first = bisect.bisect_left(self._in_order, _precedence(request), key=_precedence)
        del self._in_order[self._in_order.index(request, first)]

    @property
    def _oldest(self) -> T:
        return next(iter(self._by_arrival))


def _precedence(request: Prioritized) -> int:
    return -request.priority


class Ageing:
    """Counts the requests of one queue that overtake others. After MAX_OVERTAKES, the longest-waiting request gets the
    highest priority among those that overtook it.
    """

    def __init__(self) -> None:
        self._passes = 0
        self._highest = 0

    def passed(self, priority: int, lowest: int) -> int | None:
        """A request of `priority` has left the queue; the lowest priority that remains is `lowest`. Returns a priority
        if ageing is due: the caller raises the oldest request of a lower priority to it.
        """
        if priority <= lowest:
            return None
        self._highest = max(self._highest, priority) if self._passes else priority
        self._passes += 1
        if self._passes < MAX_OVERTAKES:
            return None
        self._passes = 0
        return self._highest
