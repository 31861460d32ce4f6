"""Lends free KV pages to hot buffers, for the rows of fully resident requests (HiSparse).

With HiSparse, a KV page has memory on the GPU for its index keys. While the page is free, hot rows can use that memory.

Pages are lent in units (memory/hisparse/shared_pool.py), each unit to one hot buffer. A buffer returns all that it has
borrowed at once, when it becomes evicting or is closed. A lent unit can be used at once: as hot pages, it is accessed
only by the ranks, in the order of their commands. A returned unit is free only when the commands sent so far are done
(holds.py): as KV pages, it is written by prefill servers, without regard to that order.
"""

import dataclasses

from ....memory.hisparse.shared_pool import PoolOverlay
from ....memory.index_spaces import HotPage, KvPage
from ....memory.pages import PageAllocator, PageGrant, pages_for
from .holds import Holds


@dataclasses.dataclass(frozen=True, slots=True)
class Loan:
    """Units that one hot buffer has borrowed: the same memory as KV pages and as hot pages."""

    grant: PageGrant[KvPage]
    hot_pages: list[HotPage]


class PageLending:
    """Lends free pages, except for reserved ones and for twice the `margin`."""

    def __init__(self, allocator: PageAllocator[KvPage], overlay: PoolOverlay, holds: Holds) -> None:
        self._allocator = allocator
        self._overlay = overlay
        self._holds = holds
        if overlay.count:
            allocator.divide(overlay.kv_pages)
        self.allowed = True
        """False while a request waits for pages: free pages are for it."""
        self.margin = 0
        """Free pages that running requests may need beyond their reservations, until lent pages have been returned."""
        self.borrowed = 0
        """Pages that hot buffers have."""

    @property
    def returning(self) -> int:
        """Pages that were returned and that commands in flight may still access."""
        return self._allocator.lent - self.borrowed

    @property
    def room(self) -> int:
        """Hot pages that can be borrowed. Twice the margin stays free: if only the margin did, the next page that a
        request takes would already make us reclaim the loan.
        """
        return self._allocator.lendable(2 * self.margin) * self._overlay.hot_pages if self.allowed else 0

    def borrow(self, owner: str, hot_pages: int) -> Loan:
        """Lend at least `hot_pages` hot pages, in whole units. `room` has to be large enough."""
        grant = self._allocator.lend(f"hot buffer of {owner}", pages_for(hot_pages, self._overlay.hot_pages))
        self.borrowed += len(grant.pages)
        return Loan(grant, self._overlay.hot_pages_under(grant.pages))

    def give_back(self, loan: Loan) -> None:
        """Take a loan back. The caller tells the ranks, before any other command, to stop using its hot pages."""
        self.borrowed -= len(loan.grant.pages)
        self._holds.release(loan.grant)
