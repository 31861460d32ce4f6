"""The memory that requests run in: pages of KV and, with HiSparse, a hot buffer for each that runs."""

from collections.abc import Iterable

from ....memory.index_spaces import KvPage
from ....memory.pages import PageAllocator, pages_for
from ...messages.effects import Effect, LoadPages, OpenHot, ResizeHot, SavePages
from ...messages.lifecycle import State
from ..requests.request import Request
from .background_copies import BackgroundCopies, Copy
from .command_log import CommandLog
from .hot_buffers import HotBuffer, HotBuffers, HotLimits
from .page_lending import PageLending

_WITH_HOT_BUFFER = (State.READY, State.RUNNING)
MARGIN_PAGES = 2
"""Pages for each running request that has to find more than is reserved for it. Two steps may be under way when loans
are called in, and until those have ended a request takes at most two pages.
"""


class RequestMemory:
    """Sets up, extends and takes back what requests hold.

    Pages that are taken back rest until the ranks have done all that they were told (orders.py): then a prefill server
    may write them. Hot pages are touched by the ranks alone, in line with what they are told, and change hands at once.
    Memory that is being copied is taken back when the copy has ended (background_copies.py).

    Hot buffers borrow free pages (loans.py). `call_in` has them back when somebody lacks them.
    """

    def __init__(
        self, pages: PageAllocator[KvPage], page_size: int, hot_limits: HotLimits | None, effects: list[Effect]
    ) -> None:
        self.pages = pages
        self.commands = CommandLog(pages)
        self.copies = BackgroundCopies()
        self._lending: PageLending | None = None
        self.hot: HotBuffers | None = None
        if hot_limits is not None:
            overlay = hot_limits.overlay
            self._lending = PageLending(pages, overlay, self.commands) if overlay is not None else None
            self.hot = HotBuffers(hot_limits, self._lending)
        self._page_size = page_size
        self._effects = effects

    def may_admit(self) -> bool:
        """Whether another request can have what it needs to run beside its pages."""
        return self.hot is None or self.hot.can_open()

    def open_hot(self, request: Request) -> bool:
        """Give a request that has its pages a hot buffer, where it needs one; call after `may_admit`. False where its
        rows are being copied there: it can run when that has ended.
        """
        if self.hot is None:
            return True
        buffer, shrunk = self.hot.open(request.rid, request.kv_tokens + 1)
        self._effects += [_resized(other) for other in shrunk]
        copy = self.copies.begin("open", request) if buffer.loading else None
        self._effects.append(
            OpenHot(
                copy.number if copy is not None else None,
                buffer.slot,
                tuple(buffer.pages),
                tuple(request.pages),
                request.kv_tokens,
                buffer.capacity,
            )
        )
        return copy is None

    def to_reopen(self, running: Iterable[Request], requests: int) -> Request | None:
        """One of those whose hot buffers cycle that should be resident again: there is room to spare beside what those
        of the `requests` need that have no buffer yet.
        """
        if self.hot is None or self.hot.resident == len(self.hot):
            return None
        room = self.hot.room_to_spare(coming=requests - len(self.hot))
        if not room:
            return None
        for request in running:
            tokens = request.kv_tokens + request.in_flight + 1
            if request.may_step and self.hot.worth_reopening(request.rid, tokens, room):
                return request
        return None

    def save(self, request: Request, pages: int) -> None:
        """Copy the first pages of a request to host memory; it has none from now on."""
        copy = self.copies.begin("save", request)
        self._effects.append(SavePages(copy.number, request.rid, tuple(request.pages[:pages])))
        self.close_hot(request)
        copy.grant, request.grant = request.grant, None

    def load(self, request: Request) -> None:
        """Copy what was saved of a request to its new pages."""
        copy = self.copies.begin("load", request)
        self._effects.append(LoadPages(copy.number, request.rid, tuple(request.pages)))

    def copy_done(self, number: int) -> Copy:
        """All ranks have made a copy: what it held is released."""
        copy = self.copies.end(number)
        if copy.grant is not None:
            self.commands.release(copy.grant)
        if self.hot is not None and copy.buffer is not None:
            self.hot.free(copy.buffer)
        elif self.hot is not None and copy.kind == "open":
            self.hot.of(copy.request.rid).loading = False
        return copy

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
        loans, hot, pages = self._lending, self.hot, self.pages
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

    def growth(self, request: Request) -> int:
        """Pages that it may still need, beyond what is reserved for it."""
        assert request.grant is not None, f"{request.rid} runs without pages"
        most = pages_for(request.most_kv_tokens, self._page_size)
        return max(0, most - len(request.grant.pages) - request.grant.reserved)

    @property
    def pages_are_coming(self) -> bool:
        """Pages were given up that are not free yet, or are lent until a copy is done."""
        borrowing = self.hot is not None and self.hot.borrower_is_loading
        return bool(self.commands.resting) or self.copies.hold_pages or borrowing

    def release(self, request: Request) -> None:
        """Take everything. A request without memory has nothing to give."""
        copy = self.copies.of(request)
        if copy is not None and copy.kind != "save":
            copy.grant, request.grant = request.grant, None
            if self.hot is not None and copy.kind == "open":
                copy.buffer = self.hot.detach(request.rid)
            return
        self.close_hot(request)
        if request.grant is not None:
            self.commands.release(request.grant)
            request.grant = None

    def check_integrity(self, requests: "dict[str, Request]", *, idle: bool) -> None:
        """Raise PageLeakError or AssertionError unless all pages are accounted for and exactly those of `requests`
        that run, or are about to, have hot buffers.
        """
        self.pages.check_integrity(idle=idle)
        if self.hot is not None:
            self.hot.check_integrity(idle=idle)
            running = {
                rid
                for rid, request in requests.items()
                if request.state in _WITH_HOT_BUFFER
                or (request.state is State.ARRIVED and self.copies.of(request) is not None)
            }
            assert self.hot.owners == running, f"hot buffers of {self.hot.owners ^ running} are not as their states say"
        if self._lending is not None and not self.commands.resting:
            assert self._lending.coming == 0, f"{self._lending.coming} pages were given back and are not here"


def _resized(buffer: HotBuffer) -> ResizeHot:
    return ResizeHot(buffer.slot, tuple(buffer.pages), buffer.capacity)
