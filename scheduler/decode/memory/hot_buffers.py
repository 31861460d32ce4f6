"""How many rows each request has on the GPU when the KV is in host memory (HiSparse). Plain integers, no tensors.

Every running request has a hot buffer: a request slot and pages of the hot pool. The first pages of the buffer hold
`hot_rows` rows under LRU replacement, and the newest row. They are reserved at admission, so a running request always
has them. A buffer is in one of two states:

fully resident   While memory is free, the buffer has further pages for all rows of the request; steps fetch no rows.
evicting         When memory is needed, the buffer gives up all but its first pages; steps fetch missing rows from host
                 memory, which has all rows. The buffer becomes fully resident again when pages are to spare, and when
                 it has fetched about as many rows as have to be copied for that.

Further pages come from these sources, in this order: pages of the hot pool beyond the first pages of all slots; free KV
pages (page_lending.py), which new prompts reclaim; the rest of the hot pool, which new hot buffers reclaim. First pages
are never borrowed.

A prompt has a fully resident buffer from the start, in pages of the hot pool, if this server computes it or if prefill
writes its rows to the GPU (placement/kv_path.py). This buffer is not shrunk until the prompt is computed, or until its
rows have arrived and are in host memory too. After the prompt is computed or received, a request inherits the buffer.

Ranks access hot pages in the order of their commands, so a released hot page can be reused by a later command at once.
A prefill server writes without regard to that order: it gets hot pages only while no command in flight accesses a free
one (`settled`).
"""

import dataclasses
from collections.abc import Sequence

from ....memory.hisparse.shared_pool import PoolOverlay
from ....memory.index_spaces import HotPage, KvPage, RequestSlot
from ....memory.pages import PageAllocator, PageGrant, pages_for
from .holds import Holds
from .page_lending import Loan, PageLending

HotOwner = str | int
"""The rid of a request, or the id of a prompt that this server computes or receives into a hot buffer."""

FETCHED_PER_STEP = 128
"""Rows that a step fetches for an evicting sequence, roughly: 6 % of a selection of 2,048."""


@dataclasses.dataclass(frozen=True)
class HotLimits:
    """The hot pool of a decode server, the same on all ranks. Hot pages with ids below `overlay.covered` share memory
    with KV pages; the `num_pages` pages of the hot pool itself have the ids after those.
    """

    num_pages: int
    page_size: int
    hot_rows: int
    slots: int
    overlay: PoolOverlay

    @property
    def buffer_pages(self) -> int:
        """First pages of a buffer: for its hot rows and the newest row."""
        return pages_for(self.hot_rows + 1, self.page_size)

    @property
    def largest_prompt(self) -> int:
        """Tokens of the longest prompt that this server can compute: the hot pool holds its rows and the next one."""
        return self.num_pages * self.page_size - 1


@dataclasses.dataclass(slots=True, eq=False)
class HotBuffer:
    """The hot rows of one request. Token p is in row p while the sequence has at most `capacity` tokens. With more
    tokens, the buffer is evicting and uses its first pages only.
    """

    owner: HotOwner
    slot: RequestSlot
    grant: PageGrant[HotPage]
    """Pages of the hot pool: its first pages, and maybe further ones."""
    pages: list[HotPage]
    """All pages in use, in the order of its rows."""
    tokens: int
    """Length of the sequence, including the last step that was sent."""
    loans: list[Loan] = dataclasses.field(default_factory=list)
    spare: list[HotPage] = dataclasses.field(default_factory=list)
    """Borrowed pages that are not in use yet; the next one is last."""
    capacity: int = 0
    evicting_since: int | None = None
    """Length of the sequence when it became evicting; None while it is fully resident."""
    loading: bool = False
    """Its rows are being copied into the buffer, which gives up no page until the copy has ended."""
    computing: bool = False
    """Its prompt is being computed, in chunks that need all rows, or prefill is writing its rows. Until that has ended,
    it gives up no page.
    """
    unsaved: bool = False
    """Prefill has written its rows here, and they are not in host memory yet. Until they are, it gives up no page."""

    @property
    def fixed(self) -> bool:
        """It gives up no page now."""
        return self.loading or self.computing or self.unsaved

    @property
    def evicting(self) -> bool:
        return self.evicting_since is not None

    @property
    def borrowed(self) -> int:
        """KV pages that it has borrowed."""
        return sum(len(loan.grant.pages) for loan in self.loans)


class HotBuffers:
    """All hot buffers of a decode server."""

    def __init__(self, limits: HotLimits, kv_pages: PageAllocator[KvPage], holds: Holds) -> None:
        """Buffers borrow from the free `kv_pages`."""
        self.limits = limits
        self._holds = holds
        self._released_at = 0
        """The last command that may access a hot page that is free now."""
        self.allocator = PageAllocator[HotPage](limits.num_pages, limits.overlay.covered)
        self.lending = PageLending(kv_pages, limits.overlay, holds)
        self._free_slots = [RequestSlot(number) for number in range(limits.slots - 1, -1, -1)]
        self._buffers: dict[HotOwner, HotBuffer] = {}
        self._copied_last: list[HotBuffer] = []
        """Buffers of ended requests that a copy still writes or reads."""

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def owners(self) -> set[HotOwner]:
        """The requests and prompts that have a buffer."""
        return set(self._buffers)

    @property
    def fully_resident(self) -> int:
        """Requests that have all their rows on the GPU."""
        return sum(not buffer.evicting for buffer in self._buffers.values())

    def spare_pages(self, coming: int) -> int:
        """Pages that one more request may use to become fully resident. Pages are kept for the first pages of the
        `coming` requests, which have no buffer yet, and one page for the next rows of each fully resident request.
        """
        wanted = min(coming, len(self._free_slots)) * self.limits.buffer_pages + self.fully_resident
        return max(0, self.allocator.available - wanted) + self.lending.room

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def settled(self) -> bool:
        """Whether no command in flight accesses a free page of the hot pool."""
        return self._holds.is_done(self._released_at)

    def announced(self, pages: Sequence[HotPage]) -> tuple[int, ...]:
        """Convert ids of hot pages to those that are sent to prefill servers, where the hot pool starts at 0."""
        return tuple(page - self.limits.overlay.covered for page in pages)

    def can_open(self) -> bool:
        """Whether another request can have a buffer, if necessary by shrinking fully resident ones."""
        return self._has_room(self.limits.buffer_pages)

    def can_compute(self, tokens: int, *, shrink: bool) -> bool:
        """Whether a prompt can have a fully resident buffer of `tokens` rows in the hot pool; with `shrink`, if
        necessary by shrinking fully resident ones.
        """
        return self._has_room(max(self.limits.buffer_pages, pages_for(tokens, self.limits.page_size)), shrink=shrink)

    def open(self, rid: str, tokens: int) -> tuple[HotBuffer, list[HotBuffer]]:
        """Allocate a buffer for a sequence of `tokens` tokens, the newest included. Returns it with the buffers that
        were shrunk for it. It is fully resident if memory is free for all its rows. Call after `can_open`.
        """
        wanted = pages_for(tokens, self.limits.page_size)
        first = min(wanted, self.limits.buffer_pages)
        buffer, shrunk = self._allocate(rid, first, tokens)
        if self._extend(buffer, wanted - first):
            buffer.loading = True
        else:
            buffer.evicting_since = tokens
        self._set_capacity(buffer)
        return buffer, shrunk

    def open_for_prompt(self, prompt_id: int, tokens: int) -> tuple[HotBuffer, list[HotBuffer]]:
        """Allocate a fully resident buffer of `tokens` rows for a prompt that is computed, or whose rows are received.
        Returns it with the buffers that were shrunk for it: none if enough pages are free. Call after `can_compute`.
        """
        buffer, shrunk = self._allocate(prompt_id, pages_for(tokens, self.limits.page_size), tokens)
        buffer.computing = True
        self._set_capacity(buffer)
        return buffer, shrunk

    def pass_on(self, prompt_id: int, rid: str) -> None:
        """A prompt is computed or received: its buffer is that of a request from now on."""
        buffer = self._buffers[rid] = self._buffers.pop(prompt_id)
        buffer.owner = rid
        buffer.computing = False

    def must_wait(self, rid: str, tokens: int) -> bool:
        """Whether a request has to skip steps: its buffer has no page for `tokens` tokens, and cannot become evicting
        because its rows are not in host memory yet.
        """
        buffer = self._buffers[rid]
        pages = len(buffer.pages)
        if not buffer.unsaved or tokens <= pages * self.limits.page_size or pages < self.limits.buffer_pages:
            return False
        return not buffer.spare and not self.allocator.available and not self.lending.room

    def worth_reopening(self, rid: str, tokens: int, room: int) -> bool:
        """Whether an evicting request of `tokens` tokens should become fully resident: it has fetched about as many
        rows as have to be copied, and needs at most `room` (`spare_pages`) further pages.
        """
        buffer = self._buffers[rid]
        if buffer.evicting_since is None or (tokens - 1 - buffer.evicting_since) * FETCHED_PER_STEP < tokens:
            return False
        return pages_for(tokens, self.limits.page_size) - len(buffer.pages) <= room

    def grow(self, rid: str, tokens: int) -> HotBuffer | None:
        """Extend a buffer to `tokens` tokens; returns it if its pages or capacity have changed.

        A fully resident request that finds no free page becomes evicting.
        """
        buffer = self._buffers[rid]
        buffer.tokens = tokens
        if buffer.evicting or tokens <= len(buffer.pages) * self.limits.page_size:
            return None
        while len(buffer.pages) * self.limits.page_size < tokens:
            if len(buffer.pages) < self.limits.buffer_pages:
                self._take_own(buffer, 1)
            elif not self._extend(buffer, 1):
                self.shrink(buffer)
                return buffer
        self._set_capacity(buffer)
        return buffer

    def largest_borrower(self) -> HotBuffer | None:
        """The buffer that would return most pages; None if no buffer can return any."""
        borrowers = (buffer for buffer in self._buffers.values() if buffer.loans and not buffer.fixed)
        return max(borrowers, key=lambda buffer: buffer.borrowed, default=None)

    @property
    def borrower_is_loading(self) -> bool:
        """Whether a buffer can return borrowed pages when the copy of its rows has ended."""
        return any(buffer.fixed and buffer.loans for buffer in self._buffers.values())

    def shrink(self, buffer: HotBuffer) -> None:
        """Make a fully resident buffer evicting: keep its first pages and return what it has borrowed."""
        assert not buffer.unsaved, f"rows of {buffer.owner} are not in host memory"
        self._note_release()
        self.allocator.give_back(buffer.grant, self._beyond_first(buffer))
        del buffer.pages[self.limits.buffer_pages :]
        self._give_back(buffer)
        if buffer.evicting_since is None:
            buffer.evicting_since = buffer.tokens
        self._set_capacity(buffer)

    def close(self, owner: HotOwner) -> None:
        """Release the buffer of a request or prompt that has ended or was retracted, if it has one. While a copy holds
        it, that is its last user.
        """
        buffer = self._buffers.pop(owner, None)
        if buffer is not None and buffer.grant.users > 1:
            self.allocator.release(buffer.grant)
            self._copied_last.append(buffer)
        elif buffer is not None:
            assert not buffer.loading, f"the hot buffer of {owner} is being written"
            assert not buffer.unsaved, f"rows of {owner} are not in host memory"
            self._release(buffer)

    def copied(self, buffer: HotBuffer) -> None:
        """The copy that held this buffer has ended."""
        buffer.loading = buffer.unsaved = False
        if buffer.grant.users > 1:
            self.allocator.release(buffer.grant)
        elif buffer in self._copied_last:
            self._copied_last.remove(buffer)
            self._release(buffer)
        else:
            self.release_quarantined(buffer.grant)

    def quarantine(self, prompt_id: int) -> PageGrant[HotPage]:
        """Take the hot pages of a prompt whose transfer was given up. Call `release_quarantined` when the writer has
        stopped. The slot is free at once, because the writer accesses only pages.
        """
        buffer = self._buffers.pop(prompt_id)
        assert not buffer.loans, f"prefill writes to borrowed pages of prompt {prompt_id}"
        self._free_slots.append(buffer.slot)
        return buffer.grant

    def release_quarantined(self, grant: PageGrant[HotPage]) -> None:
        """The writer of these pages, or a copy that held them, has stopped."""
        self._note_release()
        self.allocator.release(grant)

    def _release(self, buffer: HotBuffer) -> None:
        self._note_release()
        self.allocator.release(buffer.grant)
        self._give_back(buffer)
        self._free_slots.append(buffer.slot)

    def _note_release(self) -> None:
        """Steps in flight may access the pages that are released now."""
        self._released_at = self._holds.issued

    def of(self, owner: HotOwner) -> HotBuffer:
        return self._buffers[owner]

    def gauges(self) -> dict[str, float]:
        """Occupancy, for the metrics."""
        loans = [loan for buffer in self._buffers.values() for loan in buffer.loans]
        return {
            "hot_pages": self.limits.num_pages,
            "hot_pages_available": self.allocator.available,
            "hot_pages_borrowed": sum(len(loan.hot_pages) for loan in loans),
            "hot_buffers": len(self),
            "hot_buffers_resident": self.fully_resident,
            "hot_buffers_unsaved": sum(buffer.unsaved for buffer in self._buffers.values()),
        }

    def check_integrity(self, *, idle: bool) -> None:
        """Raise PageLeakError unless every hot page is accounted for."""
        self.allocator.check_integrity(idle=idle)
        buffers = [*self._buffers.values(), *self._copied_last]
        slots = sorted([*self._free_slots, *(buffer.slot for buffer in buffers)])
        assert slots == list(range(self.limits.slots)), f"request slots are {slots}"
        for buffer in buffers:
            held = {*buffer.grant.pages, *(page for loan in buffer.loans for page in loan.hot_pages)}
            used = [*buffer.pages, *buffer.spare]
            assert held == set(used), f"the hot buffer of {buffer.owner} has pages {sorted(held)} and uses {used}"
            assert len(held) == len(used), f"the hot buffer of {buffer.owner} uses a page twice: {used}"
            first = buffer.pages[: self.limits.buffer_pages]
            assert buffer.grant.pages[: len(first)] == first, f"first pages of {buffer.owner} are not its own: {first}"

    @property
    def _unneeded(self) -> int:
        """Free pages of the hot pool beyond the first pages of all free slots."""
        return max(0, self.allocator.available - len(self._free_slots) * self.limits.buffer_pages)

    def _has_room(self, pages: int, *, shrink: bool = True) -> bool:
        """Whether a slot and this many pages of the hot pool are free, or would be if buffers shrank."""
        spare = sum(self._beyond_first(buffer) for buffer in self._buffers.values()) if shrink else 0
        return bool(self._free_slots) and self.allocator.available + spare >= pages

    def _allocate(self, owner: HotOwner, pages: int, tokens: int) -> tuple[HotBuffer, list[HotBuffer]]:
        """Allocate a buffer with `pages` pages of the hot pool, and reserve the rest of its first pages. Returns it
        with the buffers that were shrunk for it.
        """
        reserve = max(0, self.limits.buffer_pages - pages)
        shrunk = self._free_pages(pages + reserve)
        name = owner if isinstance(owner, str) else f"prompt {owner}"
        grant = self.allocator.grant(name, pages, reserve=reserve)
        assert grant is not None, f"no {pages} + {reserve} hot pages for {name}"
        buffer = HotBuffer(owner, self._free_slots.pop(), grant, list(grant.pages), tokens)
        self._buffers[owner] = buffer
        return buffer, shrunk

    def _free_pages(self, count: int) -> list[HotBuffer]:
        """Shrink the largest buffers until this many pages of the hot pool are free; returns them."""
        shrunk: list[HotBuffer] = []
        while self.allocator.available < count:
            largest = max(self._buffers.values(), key=self._beyond_first)
            assert self._beyond_first(largest), f"no {count} pages for a hot buffer"
            self.shrink(largest)
            shrunk.append(largest)
        return shrunk

    def _extend(self, buffer: HotBuffer, count: int) -> bool:
        """Give a fully resident buffer `count` pages after its first ones; False, without a change, if there are not
        enough.
        """
        missing = count - min(count, len(buffer.spare))
        room = self.lending.room
        if missing > self.allocator.available + room:
            return False
        borrowed = min(max(0, missing - self._unneeded), room)
        buffer.pages += [buffer.spare.pop() for _ in range(count - missing)]
        self._take_own(buffer, missing - borrowed)
        if borrowed:
            loan = self.lending.borrow(str(buffer.owner), borrowed)
            buffer.loans.append(loan)
            buffer.pages += loan.hot_pages[:borrowed]
            buffer.spare = loan.hot_pages[: borrowed - 1 : -1]
        return True

    def _take_own(self, buffer: HotBuffer, count: int) -> None:
        for _ in range(count):
            grown = self.allocator.grow(buffer.grant)
            assert grown, f"no hot page for {buffer.owner}, although one was available"
            buffer.pages.append(buffer.grant.pages[-1])

    def _give_back(self, buffer: HotBuffer) -> None:
        for loan in buffer.loans:
            self.lending.give_back(loan)
        buffer.loans, buffer.spare = [], []

    def _set_capacity(self, buffer: HotBuffer) -> None:
        rows = 0 if buffer.evicting else len(buffer.pages) * self.limits.page_size
        buffer.capacity = max(self.limits.hot_rows, rows)

    def _beyond_first(self, buffer: HotBuffer) -> int:
        """Pages of the hot pool that a buffer would give up if it shrank."""
        return 0 if buffer.fixed else max(0, len(buffer.grant.pages) - self.limits.buffer_pages)
