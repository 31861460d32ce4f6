"""The memory that requests run in: pages of KV and, with HiSparse, a hot buffer for each that runs."""

from ..memory.index_spaces import KvPage
from ..memory.pages import PageAllocator
from .effects import Effect, OpenHot, ResizeHot
from .hot_buffers import HotBuffer, HotBuffers, HotLimits
from .lifecycle import State
from .orders import Orders
from .request import Request

_WITH_HOT_BUFFER = (State.READY, State.RUNNING)


class RequestMemory:
    """Sets up, extends and takes back what requests hold.

    Pages that are taken back rest until the ranks have done all that they were told (orders.py): then a prefill server
    may write them. Hot pages are touched by the ranks alone, in line with what they are told, and change hands at once.
    """

    def __init__(
        self, pages: PageAllocator[KvPage], page_size: int, hot_limits: HotLimits | None, effects: list[Effect]
    ) -> None:
        self.pages = pages
        self.orders = Orders(pages)
        self.hot = HotBuffers(hot_limits) if hot_limits is not None else None
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
        self._effects.append(
            OpenHot(buffer.slot, tuple(buffer.pages), tuple(request.pages), request.kv_tokens, buffer.capacity)
        )

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


def _resized(buffer: HotBuffer) -> ResizeHot:
    return ResizeHot(buffer.slot, tuple(buffer.pages), buffer.capacity)
