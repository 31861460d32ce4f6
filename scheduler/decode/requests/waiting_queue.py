"""Requests that wait in line: the higher priority first, then who came first."""

import bisect
from collections.abc import Iterator

from .ageing import Ageing
from .request import Request


class WaitingQueue:
    """A line in the order of precedence. Who comes back to it stands where it would have stood all the time. Nobody is
    passed for ever (ageing.py).
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._ageing = Ageing()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests[self._place(request) :]

    @property
    def first(self) -> Request:
        """Whose turn it is; there is somebody."""
        return self._requests[0]

    def push(self, request: Request) -> None:
        bisect.insort(self._requests, request, key=_precedence)

    def remove(self, request: Request) -> None:
        """It has to be here."""
        del self._requests[self._requests.index(request, self._place(request))]

    def take(self, request: Request) -> None:
        """Remove one that has got what it waited for."""
        self.remove(request)
        self.passed_by(request.priority)

    def pop(self) -> Request:
        """Take the first; there is one."""
        first = self.first
        self.take(first)
        return first

    def passed_by(self, priority: int) -> None:
        """One of this priority has got what these wait for; now and then that makes one of them as urgent."""
        if not self._requests or (raised := self._ageing.passed(priority, self._requests[-1].priority)) is None:
            return
        passed = [request for request in self._requests if request.priority < raised]
        oldest = min(passed, key=lambda request: (request.lifecycle.started, request.sample))
        self.remove(oldest)
        oldest.priority = raised
        self.push(oldest)

    def _place(self, request: Request) -> int:
        """Where those begin that came at the same moment."""
        return bisect.bisect_left(self._requests, _precedence(request), key=_precedence)


def _precedence(request: Request) -> tuple[int, float, int]:
    return -request.priority, request.lifecycle.started, request.sample
