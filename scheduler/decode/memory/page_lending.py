"""Free pages of keys, lent to hot buffers for the rows of residents: memory that is wanted back some day.

Pages are lent in lots (memory/hisparse/shared_pool.py), to one buffer each, and a buffer gives back all it has borrowed
at once: it either has all rows of its sequence or cycles. As hot pages they are touched by the ranks' orders alone, in
line, so a lot can be used at once. As pages they are written by prefill servers, which do not wait in that line, so one
that comes home rests until the ranks have done all they were told (orders.py).
"""

import dataclasses

from ....memory.hisparse.shared_pool import PoolOverlay
from ....memory.index_spaces import HotPage, KvPage
from ....memory.pages import PageAllocator, PageGrant
from .command_log import CommandLog


@dataclasses.dataclass(frozen=True, slots=True)
class Loan:
    """PoolOverlay that one hot buffer has."""

    grant: PageGrant[KvPage]
    hot_pages: list[HotPage]


class PageLending:
    """Lends what is free beyond what is reserved and `margin`."""

    def __init__(self, pages: PageAllocator[KvPage], overlay: PoolOverlay, commands: CommandLog) -> None:
        self._pages = pages
        self._overlay = overlay
        self._commands = commands
        if overlay.count:
            pages.divide(overlay.kv_pages)
        self.allowed = True
        """Nobody waits for pages: what is free is not lent before they have had theirs."""
        self.margin = 0
        """Free pages that running requests may need, beyond what is reserved for them, before a loan can be home."""
        self.borrowed = 0
        """Pages that buffers have."""

    @property
    def coming(self) -> int:
        """Pages that were given back and rest."""
        return self._pages.lent - self.borrowed

    @property
    def room(self) -> int:
        """Hot pages that can be borrowed. Twice the margin stays: with once, the next page somebody takes would call
        the loan in again.
        """
        return self._pages.lendable(2 * self.margin) * self._overlay.hot_pages if self.allowed else 0

    def borrow(self, owner: str, hot_pages: int) -> Loan:
        """As many hot pages, of those for which there is `room`, or a few more: whole lots."""
        grant = self._pages.lend(f"hot buffer of {owner}", -(-hot_pages // self._overlay.hot_pages))
        self.borrowed += len(grant.pages)
        return Loan(grant, self._overlay.hot_pages_under(grant.pages))

    def give_back(self, loan: Loan) -> None:
        """The ranks will have been told, before anything else, to use these hot pages no more."""
        self.borrowed -= len(loan.grant.pages)
        self._commands.release(loan.grant)
