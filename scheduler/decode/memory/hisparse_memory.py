"""The memory of requests with HiSparse: pages in host memory, and a hot buffer on the GPU for each running request."""

from collections.abc import Iterable, Sequence

from ....memory.index_spaces import KvPage
from ....memory.pages import PageAllocator, PageGrant
from ....memory.prefix_cache import PrefixCache
from ...messages.effects import Outbox
from ...messages.lifecycle import State
from ...messages.ranks import OpenHot, ResizeHot, WriteBackRows
from ...store.kv_store import KvStore
from ..requests.limits import DecodeLimits
from ..requests.request import Attempt, LocalPrompt, Prompt, Request
from .background_copies import Copy, CopyKind, CopyOwner
from .hot_buffers import HotBuffer, HotBuffers, HotLimits, HotOwner
from .request_memory import RequestMemory

_WITH_HOT_BUFFER = (State.OPENING, State.READY, State.RUNNING)
MARGIN_PAGES = 2
"""Pages kept for each running request that may grow beyond its reservation. Two steps may be in flight when lent pages
are reclaimed; until both have ended, a request takes at most two pages.
"""


class HisparseMemory(RequestMemory):
    """Released hot pages are free at once for later commands. A prefill server gets them only when they are settled
    (hot_buffers.py).

    Rows that prefill has written to the GPU are copied to host memory after the next step has started. Until that copy
    has ended, the request is `unsaved`: it does not give up hot rows, and its pages are not shared.

    Hot buffers borrow free pages (page_lending.py). `reclaim_lent` takes them back when requests need them.
    """

    hot: HotBuffers

    def __init__(
        self,
        limits: DecodeLimits,
        allocator: PageAllocator[KvPage],
        cache: PrefixCache,
        kv_store: KvStore[LocalPrompt] | None,
        outbox: Outbox,
        hot_limits: HotLimits,
    ) -> None:
        super().__init__(limits, allocator, cache, kv_store, outbox)
        self.hot = HotBuffers(hot_limits, allocator, self.holds)

    @property
    def largest_prompt(self) -> float:
        """A hot buffer must hold all rows of the prompt."""
        return self.hot.limits.largest_prompt

    def may_compute(self, prompt: Prompt, *, shrink: bool) -> bool:
        return self.hot.can_compute(prompt.tokens + 1, shrink=shrink)

    def allocate_for_prompt(self, local: LocalPrompt) -> None:
        buffer, shrunk = self.hot.open_for_prompt(local.prompt.prompt_id, local.prompt_tokens + 1)
        self._outbox += [_resized(other) for other in shrunk]
        local.hot_slot = buffer.slot

    def open_for_prompt(self, local: LocalPrompt) -> bool:
        buffer = self.hot.of(local.prompt.prompt_id)
        copy = self._begin_copy("prefix", local, local.prompt.grant, buffer) if local.cached else None
        buffer.loading = copy is not None
        self._outbox.append(_opened(buffer, copy, local.pages, local.cached))
        return copy is None

    def open_for_arrival(self, prompt: Prompt, attempt: Attempt, pages: list[KvPage]) -> OpenHot:
        """Allocate the hot buffer that prefill writes the rows of a prompt to. Enough hot pages are free and `settled`.
        While prefill computes, the rows of the cached prefix are copied from `pages` into the buffer. Returns the
        command that opens the buffer; the caller sends the prompt to prefill first, so that it is not delayed.
        """
        buffer, shrunk = self.hot.open_for_prompt(prompt.prompt_id, prompt.tokens + 1)
        assert not shrunk, f"prompt {prompt.prompt_id} took hot pages of other requests"
        attempt.hot_pages = tuple(buffer.pages)
        cached = attempt.prefix_tokens
        copy = self._begin_copy("prefix", attempt, prompt.grant, buffer) if cached else None
        buffer.loading = copy is not None
        return _opened(buffer, copy, pages, cached, exact=True)

    def receive_rows(self, prompt: Prompt, attempt: Attempt, request: Request) -> None:
        """Prefill has written the rows of a prompt to its hot buffer: give it to this request, which can run. The rows
        are copied to host memory after `send_write_backs`.
        """
        self._pass_on(prompt, request)
        if attempt.prefix_tokens == prompt.tokens:
            return  # all rows came from host memory
        buffer = self.hot.of(request.rid)
        buffer.unsaved = True
        copy = self._begin_copy("write_back", request, request.grant, buffer)
        pages = tuple(request.pages[: len(attempt.hot_pages)])
        rows = attempt.prefix_tokens, prompt.tokens
        self.write_backs.append(WriteBackRows(copy.number, attempt.hot_pages, pages, *rows))

    def pass_on_hot(self, local: LocalPrompt, request: Request | None) -> None:
        if request is not None:
            self._pass_on(local.prompt, request)
        else:
            self.hot.close(local.prompt.prompt_id)

    def _pass_on(self, prompt: Prompt, request: Request) -> None:
        self.hot.pass_on(prompt.prompt_id, request.rid)
        request.hot_slot = self.hot.of(request.rid).slot

    def may_admit(self) -> bool:
        return self.hot.can_open()

    def open_hot(self, request: Request) -> bool:
        buffer, shrunk = self.hot.open(request.rid, request.kv_tokens + 1)
        request.hot_slot = buffer.slot
        self._outbox += [_resized(other) for other in shrunk]
        copy = self._begin_copy("open", request, request.grant, buffer) if buffer.loading else None
        self._outbox.append(_opened(buffer, copy, request.pages, request.kv_tokens))
        return copy is None

    def must_wait(self, request: Request) -> bool:
        return self.hot.must_wait(request.rid, request.kv_tokens + request.in_flight + 1)

    def unsaved(self, request: Request) -> bool:
        return self.copies.is_in(request, "write_back")

    def fetches(self, batch: Iterable[Request]) -> bool:
        return any(self.hot.of(request.rid).evicting for request in batch)

    def next_to_reopen(self, running: Iterable[Request], requests: int) -> Request | None:
        if self.hot.fully_resident == len(self.hot):
            return None
        room = self.hot.spare_pages(coming=requests - len(self.hot))
        if not room:
            return None
        for request in running:
            tokens = request.kv_tokens + request.in_flight + 1
            if request.may_step and self.hot.worth_reopening(request.rid, tokens, room):
                return request
        return None

    def reclaim_lent(self, running: Iterable[Request]) -> bool:
        """Reclaim lent pages in two cases: an allocation has failed since the last call and lent pages can satisfy it;
        or fewer pages are free than the margin of the `running` requests. Returns whether more pages are free now. If
        commands are in flight, the pages become free when these are done.
        """
        hot, allocator = self.hot, self.allocator
        lending = hot.lending
        shortfalls = allocator.take_shortfalls()
        lending.allowed = not shortfalls
        if lending.borrowed or allocator.lendable(0):
            lending.margin = sum(min(MARGIN_PAGES, self.unreserved_growth(request)) for request in running)
        else:  # nothing to lend: skip the sum, which would run in every turn
            lending.margin = MARGIN_PAGES * hot.limits.slots
        before = allocator.available
        wanted = max((shortfall for shortfall in shortfalls if shortfall <= allocator.lent), default=0)
        wanted = max(wanted, lending.margin - before if lending.borrowed else 0) - lending.returning
        while wanted > 0 and (buffer := hot.largest_borrower()) is not None:
            wanted -= buffer.borrowed
            hot.shrink(buffer)
            self._outbox.append(_resized(buffer))
        return allocator.available > before

    def _begin_copy(self, kind: CopyKind, owner: CopyOwner, grant: PageGrant[KvPage] | None, buffer: HotBuffer) -> Copy:
        assert grant is not None, f"a copy of {owner} without pages"
        self.hot.allocator.hold(buffer.grant)
        return self.copies.begin(kind, owner, self.holds.hold(grant), buffer)

    def grow(self, request: Request) -> bool:
        if not super().grow(request):
            return False
        tokens = request.kv_tokens + request.in_flight + 1
        if self.hot.must_wait(request.rid, tokens):
            return False
        if (grown := self.hot.grow(request.rid, tokens)) is not None:
            self._outbox.append(_resized(grown))
        return True

    @property
    def pages_pending(self) -> bool:
        return super().pages_pending or self.hot.borrower_is_loading

    def computed(self, local: LocalPrompt, end: int) -> None:
        """Its pages are added to the prefix cache when its rows are in host memory."""
        self._free_unseen(local.prompt, end)

    def insert_answer(self, request: Request) -> None:
        copy = self.copies.of(request)
        if copy is not None and copy.kind == "write_back":
            copy.tokens = request.prompt_ids + tuple(request.output_ids[:-1])  # all rows are in host memory then
        else:
            super().insert_answer(request)

    def release_copy(self, copy: Copy) -> None:
        super().release_copy(copy)
        if copy.buffer is not None:
            self.hot.copied(copy.buffer)

    def close_hot(self, request: Request) -> None:
        assert self.copies.of(request) is None or request.state is State.SAVING, f"rows of {request.rid} are copied"
        self.hot.close(request.rid)

    def release(self, request: Request) -> None:
        self.hot.close(request.rid)
        super().release(request)

    def release_prompt(self, local: LocalPrompt) -> None:
        self.hot.close(local.prompt.prompt_id)
        super().release_prompt(local)

    def gauges(self) -> dict[str, float]:
        return {**super().gauges(), **self.hot.gauges()}

    def check_integrity(self, requests: "dict[str, Request]", *, idle: bool) -> None:
        """Hot buffers have the right owners: requests that are OPENING or admitted, and prompts that are computed here
        or received on the GPU.
        """
        super().check_integrity(requests, idle=idle)
        self.hot.check_integrity(idle=idle)
        owners: set[HotOwner] = {rid for rid, request in requests.items() if request.state in _WITH_HOT_BUFFER}
        owners |= {request.prompt.prompt_id for request in requests.values() if _prompt_has_buffer(request)}
        assert self.hot.owners == owners, f"hot buffers of {self.hot.owners ^ owners} do not match their states"
        returning = 0 if self.holds.pending_grants else self.hot.lending.returning
        assert returning == 0, f"{returning} returned pages are not free"


def _prompt_has_buffer(request: Request) -> bool:
    """Whether the hot buffer still belongs to the prompt of a request: the prompt is being computed or received."""
    attempt = request.prompt.attempt
    in_transfer = request.state in (State.PREFILLING, State.VERIFYING, State.LOADING)
    receives = in_transfer and attempt is not None and bool(attempt.hot_pages)
    return request.prompt.local is not None or receives


def _opened(
    buffer: HotBuffer, copy: Copy | None, pages: Sequence[KvPage], tokens: int, *, exact: bool = False
) -> OpenHot:
    """The command that opens a hot buffer. With a `copy`, the first `tokens` rows are copied into it from `pages`,
    which are in host memory.
    """
    number = copy.number if copy is not None else None
    return OpenHot(number, buffer.slot, tuple(buffer.pages), tuple(pages), tokens, buffer.capacity, exact)


def _resized(buffer: HotBuffer) -> ResizeHot:
    return ResizeHot(buffer.slot, tuple(buffer.pages), buffer.capacity)
