"""The memory that requests run in: pages of KV and, with HiSparse, a hot buffer for each that runs."""

from collections.abc import Iterable

from ..memory.index_spaces import KvPage
from ..memory.pages import PageAllocator
from .effects import Effect, OpenHot, ResizeHot, Settle
from .hot_buffers import HotBuffer, HotBuffers, HotLimits
from .lifecycle import State
from .loans import Loans
from .orders import Orders
from .request import Request
from .reservation import pages_for

_WITH_HOT_BUFFER = (State.READY, State.RUNNING)
MARGIN_PAGES = 2
"""Pages for each running request that has to find more than is reserved for it. Two steps may be under way when loans
are called in, and until those have ended a request takes at most two pages.
"""


class RequestMemory:
    """Sets up, extends and takes back what requests hold.

    Pages that are taken back rest until the ranks have done all that they were told (orders.py): then a prefill server
    may write them. Hot pages are touched by the ranks alone, in line with what they are told, and change hands at once.

    Hot buffers borrow free pages (loans.py). `call_in` has them back when somebody lacks them.
    """

    def __init__(
        self, pages: PageAllocator[KvPage], page_size: int, hot_limits: HotLimits | None, effects: list[Effect]
    ) -> None:
        self.pages = pages
        self.orders = Orders(pages)
        self._loans: Loans | None = None
        self.hot: HotBuffers | None = None
        if hot_limits is not None:
            lots = hot_limits.lots
            self._loans = Loans(pages, lots, self.orders) if lots is not None else None
            self.hot = HotBuffers(hot_limits, self._loans)
        self._page_size = page_size
        self._effects = effects

    def may_admit(self) -> bool:
        """Whether another request can have what it needs to run beside its pages."""
        return self.hot is None or self.hot.can_open()

    def open_hot(self, request: Request) -> None:
        """Give a request that has its pages a hot buffer, where it needs one; call after `may_admit`."""
        if self.hot is None:
            return
        buffer, shrunk = self.hot.open(request.rid, request.kv_tokens + 1)
        self._effects += [_resized(other) for other in shrunk]
        self._opened(buffer, request)

    def reopen_hot(self, running: Iterable[Request], requests: int) -> None:
        """Have one of those whose hot buffers cycle resident again, where there is room to spare beside what those of
        the `requests` need that have no buffer yet. One in a turn: its rows are copied between two steps.
        """
        if self.hot is None or self.hot.resident == len(self.hot):
            return
        room = self.hot.room_to_spare(coming=requests - len(self.hot))
        if not room:
            return
        for request in running:
            tokens = request.kv_tokens + request.in_flight + 1
            if request.may_step and (buffer := self.hot.reopen(request.rid, tokens, room)) is not None:
                self._opened(buffer, request)
                return

    def close_hot(self, request: Request) -> None:
        """Take its hot buffer, if it has one. Its KV stays in its pages."""
        if self.hot is not None:
            self.hot.close(request.rid)

    def grow(self, request: Request) -> bool:
        """A place for the row that the next step writes; False when there is no page for it."""
        tokens = request.kv_tokens + request.in_flight + 1
        assert request.grant is not None, f"{request.rid} runs without pages"
        while len(request.grant.pages) * self._page_size < tokens:
            if not self.pages.grow(request.grant):
                return False
        grown = self.hot.grow(request.rid, tokens) if self.hot is not None else None
        if grown is not None:
            self._effects.append(_resized(grown))
        return True

    def call_in(self, running: Iterable[Request]) -> bool:
        """Have loans back: for those who have asked for pages in vain since the last call and would have enough then,
        and before those who run lack what is not reserved for them. Whether pages are back already: those under which
        nothing is under way. The others rest.
        """
        loans, hot, pages = self._loans, self.hot, self.pages
        if loans is None or hot is None:
            return False
        shortfalls = pages.take_shortfalls()
        loans.allowed = not shortfalls
        if loans.borrowed or pages.lendable(0):
            loans.margin = sum(min(MARGIN_PAGES, self.growth(request)) for request in running)
        else:  # there is nothing to lend: not worth the sum, in every turn
            loans.margin = MARGIN_PAGES * hot.limits.slots
        before = pages.available
        wanted = max((lacking for lacking in shortfalls if lacking <= pages.lent), default=0)
        wanted = max(wanted, loans.margin - before if loans.borrowed else 0) - loans.coming
        while wanted > 0 and (buffer := hot.largest_borrower()) is not None:
            wanted -= buffer.borrowed
            hot.shrink(buffer)
            self._effects.append(_resized(buffer))
        return pages.available > before

    def _opened(self, buffer: HotBuffer, request: Request) -> None:
        """Tell the ranks; what the steps under way write is in host memory when they come to it."""
        if buffer.loans:
            self.orders.unnumbered()
        tokens = request.kv_tokens + request.in_flight
        self._effects.append(OpenHot(buffer.slot, tuple(buffer.pages), tuple(request.pages), tokens, buffer.capacity))

    def settle(self) -> None:
        """Have the ranks report when they are done, if grants wait for that and no order is left that says so."""
        if self.orders.unsettled and not len(self.orders):
            self._effects.append(Settle(self.orders.next()))

    def growth(self, request: Request) -> int:
        """Pages that it may still need, beyond what is reserved for it."""
        assert request.grant is not None, f"{request.rid} runs without pages"
        most = pages_for(request.most_kv_tokens, self._page_size)
        return max(0, most - len(request.grant.pages) - request.grant.reserved)

    def release(self, request: Request) -> None:
        """Take everything. A request without memory has nothing to give."""
        self.close_hot(request)
        if request.grant is not None:
            self.orders.release(request.grant)
            request.grant = None

    def check_integrity(self, requests: "dict[str, Request]", *, idle: bool) -> None:
        """Raise PageLeakError or AssertionError unless all pages are accounted for and exactly those of `requests`
        that run, or are about to, have hot buffers.
        """
        self.pages.check_integrity(idle=idle)
        if self.hot is not None:
            self.hot.check_integrity(idle=idle)
            running = {rid for rid, request in requests.items() if request.state in _WITH_HOT_BUFFER}
            assert self.hot.owners == running, f"hot buffers of {self.hot.owners ^ running} are not as their states say"
        if self._loans is not None and not self.orders.resting:
            assert self._loans.coming == 0, f"{self._loans.coming} pages were given back and are not here"


def _resized(buffer: HotBuffer) -> ResizeHot:
    return ResizeHot(buffer.slot, tuple(buffer.pages), buffer.capacity)
