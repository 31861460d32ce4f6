"""Requests that wait in line: the higher priority first, then who came first."""

import bisect
from collections.abc import Iterator

from .request import Request


class RequestLine:
    """A line in the order of precedence. Who comes back to it stands where it would have stood all the time."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

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

    def pop(self) -> Request:
        """Take the first; there is one."""
        return self._requests.pop(0)

    def _place(self, request: Request) -> int:
        """Where those begin that came at the same moment."""
        return bisect.bisect_left(self._requests, _precedence(request), key=_precedence)


def _precedence(request: Request) -> tuple[int, float, int]:
    return -request.prompt.priority, request.life.started, request.sample
