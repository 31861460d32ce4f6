"""Copies that ranks make beside the steps: pages to host memory and back, rows into hot buffers.

Steps go on meanwhile. What a copy reads or writes therefore stays taken until all ranks have reported its end, whatever
becomes of the request: memory that a request gives up during a copy is handed to the copy.
"""

import dataclasses
import itertools
from typing import Literal

from ....memory.index_spaces import KvPage
from ....memory.pages import PageGrant
from ..requests.request import Request
from .hot_buffers import HotBuffer

CopyKind = Literal["save", "load", "open"]
"""KV of a retracted request to host memory; back to pages; rows of a request that is let in to its hot buffer."""


@dataclasses.dataclass(slots=True, eq=False)
class Copy:
    """One of them. `grant` and `buffer` are released when it is done."""

    number: int
    kind: CopyKind
    request: Request
    grant: PageGrant[KvPage] | None = None
    buffer: HotBuffer | None = None


class BackgroundCopies:
    """Copies under way, by number. A request has one at a time."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._under_way: dict[int, Copy] = {}
        self._of_request: dict[Request, Copy] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def hold_pages(self) -> bool:
        """Whether one of them will release pages."""
        return any(copy.grant is not None for copy in self._under_way.values())

    def begin(self, kind: CopyKind, request: Request) -> Copy:
        assert request not in self._of_request, f"{request.rid} is being copied already"
        copy = Copy(next(self._numbers), kind, request)
        self._under_way[copy.number] = self._of_request[request] = copy
        return copy

    def of(self, request: Request) -> Copy | None:
        """The copy of this request that is under way."""
        return self._of_request.get(request)

    def end(self, number: int) -> Copy:
        """All ranks have made this copy."""
        copy = self._under_way.pop(number)
        del self._of_request[copy.request]
        return copy
