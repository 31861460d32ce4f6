"""Copies that ranks make beside the steps: pages to host memory and back, rows into hot buffers.

Steps continue during a copy. So a copy holds the memory that it reads or writes until all ranks have reported its end,
also if the request ends or releases this memory earlier.
"""

import dataclasses
import itertools
from typing import Literal

from ....memory.index_spaces import KvPage
from ....memory.pages import PageGrant
from ..requests.request import Attempt, LocalPrompt, Request
from .hot_buffers import HotBuffer

CopyKind = Literal["save", "restore", "open", "prefix", "write_back"]
"""What is copied:

save         KV of a retracted request, from its pages to host memory
restore      the same KV back, into new pages
open         rows of a request, from host memory into its new hot buffer
prefix       rows of the cached prefix of a prompt, from host memory into the hot buffer of the prompt
write_back   rows that prefill has written to a hot buffer, into host memory
"""
CopyOwner = Request | LocalPrompt | Attempt


@dataclasses.dataclass(slots=True, eq=False)
class Copy:
    """A copy in flight. It holds `grant` and `buffer`."""

    number: int
    kind: CopyKind
    owner: CopyOwner
    grant: PageGrant[KvPage]
    buffer: HotBuffer | None = None
    pages: int = 0
    """Pages that a "save" copies."""
    tokens: tuple[int, ...] = ()
    """Set if the request ended during its "write_back": the tokens to insert in the prefix cache after the copy."""


class BackgroundCopies:
    """Copies in flight, by number. A request, prompt or attempt has at most one at a time."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.in_flight: dict[int, Copy] = {}
        self._of_owner: dict[CopyOwner, Copy] = {}

    @property
    def hold_pages(self) -> bool:
        """Whether pages are released when one of the copies ends."""
        return any(copy.grant.users == 1 for copy in self.in_flight.values())

    def begin(
        self, kind: CopyKind, owner: CopyOwner, grant: PageGrant[KvPage], buffer: HotBuffer | None = None
    ) -> Copy:
        """Add a copy, which has a hold of the grant and of the buffer."""
        assert owner not in self._of_owner, f"a copy for {owner} is in flight already"
        copy = Copy(next(self._numbers), kind, owner, grant, buffer)
        self.in_flight[copy.number] = self._of_owner[owner] = copy
        return copy

    def of(self, owner: CopyOwner) -> Copy | None:
        """The copy of this owner that is in flight."""
        return self._of_owner.get(owner)

    def is_in(self, request: Request, kind: CopyKind) -> bool:
        """Whether a copy of this kind is in flight for this request."""
        copy = self.of(request)
        return copy is not None and copy.kind == kind

    def end(self, number: int) -> Copy:
        """All ranks have made this copy."""
        copy = self.in_flight.pop(number)
        del self._of_owner[copy.owner]
        return copy
