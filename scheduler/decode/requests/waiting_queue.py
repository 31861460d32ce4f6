"""A queue of requests: by priority, then by arrival."""

import bisect
from collections.abc import Iterator

from .ageing import Ageing
from .request import Request


class WaitingQueue:
    """Requests in the order of precedence. A request that is queued again regains its original position. Waiting
    requests of low priority are raised (ageing.py).
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._ageing = Ageing()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests[self._position(request) :]

    @property
    def first(self) -> Request:
        """The next request; the queue is not empty."""
        return self._requests[0]

    def push(self, request: Request) -> None:
        bisect.insort(self._requests, request, key=_precedence)

    def remove(self, request: Request) -> None:
        """Remove a request, which has to be in the queue."""
        del self._requests[self._requests.index(request, self._position(request))]

    def take(self, request: Request) -> None:
        """Remove a request that got what it waited for."""
        self.remove(request)
        self.passed_by(request.priority)

    def pop(self) -> Request:
        """Take the first; the queue is not empty."""
        first = self.first
        self.take(first)
        return first

    def passed_by(self, priority: int) -> None:
        """A request of this priority got what these wait for: raise the priority of the oldest, if it is due."""
        if not self._requests or (raised := self._ageing.passed(priority, self._requests[-1].priority)) is None:
            return
        passed = [request for request in self._requests if request.priority < raised]
        oldest = min(passed, key=lambda request: (request.lifecycle.started, request.sample))
        self.remove(oldest)
        oldest.priority = raised
        self.push(oldest)

    def _position(self, request: Request) -> int:
        """The index of the first request with the same precedence."""
        return bisect.bisect_left(self._requests, _precedence(request), key=_precedence)


def _precedence(request: Request) -> tuple[int, float, int]:
    return -request.priority, request.lifecycle.started, request.sample
