"""The memory of requests: KV pages and, with HiSparse, a hot buffer for each running request."""

import math
from collections.abc import Iterable, Sequence

from ....memory.index_spaces import KvPage, RequestSlot
from ....memory.pages import PageAllocator, PageGrant, first_visible_page, most_visible_pages
from ...messages.effects import Outbox
from ...messages.lifecycle import State
from ...messages.ranks import CopyPage, DropPages, LoadPages, OpenHot, ResizeHot, SavePages, WriteBackRows
from ..requests.request import Attempt, LocalPrompt, Prompt, Request
from .background_copies import BackgroundCopies, Copy, CopyKind, CopyOwner
from .command_log import CommandLog
from .hot_buffers import HotBuffer, HotBuffers, HotLimits, HotOwner
from .reservation import growth_pages

_WITH_HOT_BUFFER = (State.OPENING, State.READY, State.RUNNING)
MARGIN_PAGES = 2
"""Pages kept for each running request that may grow beyond its reservation. Two steps may be in flight when lent pages
are reclaimed; until both have ended, a request takes at most two pages.
"""


class RequestMemory:
    """Allocates, extends and releases the memory of requests. Sends the ranks the commands that go with it.

    When released memory is free:
    - KV pages: when the commands sent so far are done (command_log.py). From then on a prefill server may write them.
    - Hot pages: at once, for later commands. A prefill server gets them only when they are settled (hot_buffers.py).
    - Memory that a copy, a verification or a scatter accesses: when that has ended too. Each of them holds it.

    With HiSparse, rows that prefill has written to the GPU are copied to host memory after the next step has started.
    Until that copy has ended, the request is `unsaved`: it does not give up hot rows, and its pages are not shared.

    Hot buffers borrow free pages (page_lending.py). `reclaim_lent` takes them back when requests need them.

    If all layers have a sliding `window`, a request gives up the pages that its next step does not see. Such a page
    becomes the next page of the same request; if it is shared or cached, it is released instead.
    """

    def __init__(
        self,
        pages: PageAllocator[KvPage],
        page_size: int,
        hot_limits: HotLimits | None,
        outbox: Outbox,
        window: int | None = None,
    ) -> None:
        self.pages = pages
        self.copies = BackgroundCopies()
        self.commands = CommandLog(pages)
        self.hot = HotBuffers(hot_limits, pages, self.commands) if hot_limits is not None else None
        self._page_size = page_size
        self._window = window
        self._outbox = outbox
        self._write_backs: list[WriteBackRows] = []
        """Commands that `send_write_backs` will send."""

    @property
    def idle(self) -> bool:
        """No command and no copy is in flight, and no page waits for one."""
        return not (len(self.commands) or self.commands.pending_grants or len(self.copies))

    def next_command(self) -> int:
        """The `command_id` of a step that is about to be sent."""
        return self.commands.next_id()

    def command_done(self, command_id: int) -> None:
        """All ranks have completed this command and all earlier ones."""
        self.commands.completed(command_id)

    def copy_page(self, source: KvPage, destination: KvPage, *, tokens: int | None = None) -> None:
        """Copy a page, or its first `tokens` tokens, in order with the steps."""
        self._outbox.append(CopyPage(self.commands.next_id(), source, destination, tokens))

    def may_admit(self) -> bool:
        """Whether another request that has its pages can be admitted: with HiSparse it also needs a hot buffer."""
        return self.hot is None or self.hot.can_open()

    def hot_slot(self, request: Request) -> RequestSlot | None:
        """The slot of its hot buffer (HiSparse)."""
        return self.hot.of(request.rid).slot if self.hot is not None else None

    def open_hot(self, request: Request) -> bool:
        """Allocate a hot buffer, with HiSparse, for a request that has its pages; call after `may_admit`. Returns False
        if its rows are being copied: it can run when the copy has ended.
        """
        if self.hot is None:
            return True
        buffer, shrunk = self.hot.open(request.rid, request.kv_tokens + 1)
        self._outbox += [_resized(other) for other in shrunk]
        copy = self._begin_copy("open", request, request.grant, buffer) if buffer.loading else None
        self._outbox.append(_opened(buffer, copy, request.pages, request.kv_tokens))
        return copy is None

    @property
    def largest_prompt(self) -> float:
        """Tokens of the longest prompt that this server can compute. With HiSparse, a hot buffer must hold all rows of
        the prompt. With a window, the pool must hold all pages of the prompt, and some for growth. Otherwise there is
        no limit for prompts, only the one for whole sequences.
        """
        if self.hot is not None:
            return self.hot.limits.largest_prompt
        if self._window is None:
            return math.inf
        growth = most_visible_pages(self._window, self._page_size) - 1
        return max(0, self.pages.num_pages - growth) * self._page_size

    def may_compute(self, prompt: Prompt, *, shrink: bool) -> bool:
        """Whether a prompt that has its pages can be computed here: with HiSparse, whether it can get a hot buffer.
        With `shrink`, fully resident requests may become evicting for that.
        """
        return self.hot is None or self.hot.can_compute(prompt.tokens + 1, shrink=shrink)

    def allocate_for_prompt(self, local: LocalPrompt) -> None:
        """Allocate a hot buffer, with HiSparse, for a prompt that has its pages; call after `may_compute`."""
        if self.hot is not None:
            buffer, shrunk = self.hot.open_for_prompt(local.prompt.prompt_id, local.prompt_tokens + 1)
            self._outbox += [_resized(other) for other in shrunk]
            local.hot_slot = buffer.slot

    def open_for_prompt(self, local: LocalPrompt) -> bool:
        """Open the hot buffer of a prompt, with HiSparse. Returns False if the rows of its cached prefix are being
        copied: it can be computed when the copy has ended.
        """
        if self.hot is None:
            return True
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
        assert self.hot is not None, "only HiSparse has hot buffers"
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
        assert self.hot is not None, "only HiSparse has hot buffers"
        self.hot.pass_on(prompt.prompt_id, request.rid)
        if attempt.prefix_tokens == prompt.tokens:
            return  # all rows came from host memory
        buffer = self.hot.of(request.rid)
        buffer.unsaved = True
        copy = self._begin_copy("write_back", request, request.grant, buffer)
        pages = tuple(request.pages[: len(attempt.hot_pages)])
        rows = attempt.prefix_tokens, prompt.tokens
        self._write_backs.append(WriteBackRows(copy.number, attempt.hot_pages, pages, *rows))

    def send_write_backs(self) -> None:
        """Copy the rows of arrived requests to host memory. Call it after the next step was sent to the ranks:
        otherwise the copy would delay the first step of a request.
        """
        self._outbox += self._write_backs
        self._write_backs.clear()

    def unsaved(self, request: Request) -> bool:
        """Whether the rows of a request are only in its hot buffer, because the copy to host memory has not ended."""
        return self.copies.is_in(request, "write_back")

    def must_wait(self, request: Request) -> bool:
        """Whether a request has to wait with its next step until its rows are in host memory: no hot page is free."""
        return self.hot is not None and self.hot.must_wait(request.rid, request.kv_tokens + request.in_flight + 1)

    def pass_on_hot(self, local: LocalPrompt, request: Request | None) -> None:
        """A prompt is computed: give its hot buffer, if it has one, to this request, or release it."""
        if self.hot is None:
            return
        if request is not None:
            self.hot.pass_on(local.prompt.prompt_id, request.rid)
        else:
            self.hot.close(local.prompt.prompt_id)

    def release_prompt(self, local: LocalPrompt) -> None:
        """Release all memory of a prompt that no request needs any more."""
        prompt = local.prompt
        grant, prompt.grant = prompt.grant, None
        assert grant is not None, f"prompt {prompt.prompt_id} was computed without pages"
        if self.hot is not None:
            self.hot.close(prompt.prompt_id)
        self.commands.release(grant)

    def fetches(self, batch: Iterable[Request]) -> bool:
        """Whether a decode step of these requests fetches rows, so that it cannot compute chunks of prompts."""
        return self.hot is not None and any(self.hot.of(request.rid).evicting for request in batch)

    def next_to_reopen(self, running: Iterable[Request], requests: int) -> Request | None:
        """An evicting request that should become fully resident again, or None. `requests` is the number of all open
        requests: pages are kept for those that have no hot buffer yet.
        """
        if self.hot is None or self.hot.fully_resident == len(self.hot):
            return None
        room = self.hot.spare_pages(coming=requests - len(self.hot))
        if not room:
            return None
        for request in running:
            tokens = request.kv_tokens + request.in_flight + 1
            if request.may_step and self.hot.worth_reopening(request.rid, tokens, room):
                return request
        return None

    def save(self, request: Request, first: int, pages: int) -> None:
        """Copy `pages` pages of a request, from its page number `first` on, to host memory, and take all its pages. The
        request must not be `unsaved`.
        """
        assert request.grant is not None, f"{request.rid} is saved without pages"
        copy = self.copies.begin("save", request, request.grant)
        copy.pages = pages
        self._outbox.append(SavePages(copy.number, request.rid, tuple(request.pages[first : first + pages])))
        self.close_hot(request)
        request.grant = None  # the hold of the request is that of the copy

    def restore(self, request: Request) -> None:
        """Copy the saved KV of a request to its new pages."""
        copy = self._begin_copy("restore", request, request.grant)
        self._outbox.append(LoadPages(copy.number, request.rid, tuple(copy.grant.held)))

    def drop_saved(self, request: Request) -> None:
        """Drop the saved KV of a request."""
        self._outbox.append(DropPages(request.rid))

    def _begin_copy(
        self, kind: CopyKind, owner: CopyOwner, grant: PageGrant[KvPage] | None, buffer: HotBuffer | None = None
    ) -> Copy:
        assert grant is not None, f"a copy of {owner} without pages"
        self.pages.hold(grant)
        if self.hot is not None and buffer is not None:
            self.hot.pages.hold(buffer.grant)
        return self.copies.begin(kind, owner, grant, buffer)

    def release_copy(self, copy: Copy) -> None:
        """Release what a copy held that has ended."""
        self.commands.release(copy.grant)
        if self.hot is not None and copy.buffer is not None:
            self.hot.copied(copy.buffer)

    def close_hot(self, request: Request) -> None:
        """Release its hot buffer, if it has one. Its KV stays in its pages."""
        assert self.copies.of(request) is None or request.state is State.SAVING, f"rows of {request.rid} are copied"
        if self.hot is not None:
            self.hot.close(request.rid)

    def grow(self, request: Request) -> bool:
        """Allocate memory for the row that the next step writes; False if no page is free, or if it `must_wait`."""
        tokens = request.kv_tokens + request.in_flight + 1
        grant = request.grant
        assert grant is not None, f"{request.rid} runs without pages"
        unseen = 0 if self._window is None else self.first_visible(tokens - 1)
        while len(grant.pages) * self._page_size < tokens:
            # steps access the pages of a request in order, so the next step may overwrite a page that earlier ones read
            if grant.freed < unseen and self.pages.reuse_first(grant):
                continue
            self._free(grant, unseen)
            if not self.pages.grow(grant):
                return False
        if grant.freed < unseen:
            self._free(grant, unseen)
        if self.hot is None:
            return True
        if self.hot.must_wait(request.rid, tokens):
            return False
        if (grown := self.hot.grow(request.rid, tokens)) is not None:
            self._outbox.append(_resized(grown))
        return True

    def free_unseen(self, prompt: Prompt, position: int) -> None:
        """Free the pages of a prompt that the token at `position` does not see, also those of its waiting requests."""
        if self._window is None:
            return
        unseen = self.first_visible(position)
        for grant in (prompt.grant, *(request.grant for request in prompt.waiting)):
            assert grant is not None, f"prompt {prompt.prompt_id} is computed without pages"
            self._free(grant, unseen)

    def first_visible(self, position: int) -> int:
        """The first page that the token at `position` sees."""
        return first_visible_page(position, self._window, self._page_size)

    def growth_pages(self, held: int, first: int, kv_tokens: int) -> int:
        """The most pages that a request takes in addition to `held` pages, from page `first` on, until it has
        `kv_tokens` tokens.
        """
        return growth_pages(held, first, kv_tokens, self._page_size, self._window)

    def _free(self, grant: PageGrant[KvPage], end: int) -> None:
        """Release the pages of a grant before page `end`, when all commands sent so far are done."""
        if grant.freed < end:
            self.commands.release(self.pages.split(grant, end))

    def reclaim_lent(self, running: Iterable[Request]) -> bool:
        """Reclaim lent pages in two cases: an allocation has failed since the last call and lent pages can satisfy it;
        or fewer pages are free than the margin of the `running` requests. Returns whether more pages are free now. If
        commands are in flight, the pages become free when these are done.
        """
        hot, pages = self.hot, self.pages
        if hot is None:
            return False
        lending = hot.lending
        shortfalls = pages.take_shortfalls()
        lending.allowed = not shortfalls
        if lending.borrowed or pages.lendable(0):
            lending.margin = sum(min(MARGIN_PAGES, self.unreserved_growth(request)) for request in running)
        else:  # nothing to lend: skip the sum, which would run in every turn
            lending.margin = MARGIN_PAGES * hot.limits.slots
        before = pages.available
        wanted = max((shortfall for shortfall in shortfalls if shortfall <= pages.lent), default=0)
        wanted = max(wanted, lending.margin - before if lending.borrowed else 0) - lending.returning
        while wanted > 0 and (buffer := hot.largest_borrower()) is not None:
            wanted -= buffer.borrowed
            hot.shrink(buffer)
            self._outbox.append(_resized(buffer))
        return pages.available > before

    def unreserved_growth(self, request: Request) -> int:
        """Pages that a request may still need beyond its reservation."""
        grant = request.grant
        assert grant is not None, f"{request.rid} runs without pages"
        held = len(grant.pages) - grant.freed
        return max(0, self.growth_pages(held, grant.freed, request.most_kv_tokens) - grant.reserved)

    @property
    def pages_pending(self) -> bool:
        """Whether pages become free when the commands or copies in flight are done."""
        borrowing = self.hot is not None and self.hot.borrower_is_loading
        return bool(self.commands.pending_grants) or self.copies.hold_pages or borrowing

    def release_grant(self, grant: PageGrant[KvPage]) -> None:
        """Release pages when all commands sent so far are done."""
        self.commands.release(grant)

    def release(self, request: Request) -> None:
        """Release all memory of a request, if it has any."""
        if self.hot is not None:
            self.hot.close(request.rid)
        if request.grant is not None:
            self.commands.release(request.grant)
            request.grant = None

    def gauges(self) -> dict[str, float]:
        """Occupancy of the hot buffers, for the metrics."""
        return self.hot.gauges() if self.hot is not None else {}

    def check_integrity(self, requests: "dict[str, Request]", *, idle: bool) -> None:
        """Raise PageLeakError or AssertionError unless all pages are accounted for, and hot buffers have the right
        owners: requests that are OPENING or admitted, and prompts that are computed here or received on the GPU.
        """
        self.pages.check_integrity(idle=idle)
        if self.hot is not None:
            self.hot.check_integrity(idle=idle)
            owners: set[HotOwner] = {rid for rid, request in requests.items() if request.state in _WITH_HOT_BUFFER}
            owners |= {request.prompt.prompt_id for request in requests.values() if _prompt_has_buffer(request)}
            assert self.hot.owners == owners, f"hot buffers of {self.hot.owners ^ owners} do not match their states"
            returning = 0 if self.commands.pending_grants else self.hot.lending.returning
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
