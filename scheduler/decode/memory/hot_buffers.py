"""Who has how many rows on the GPU when the KV is in host memory (HiSparse). Plain integers, no tensors.

Every running request has a hot buffer: a request slot and pages of the hot pool. Its first pages hold `hot_rows` rows
under LRU replacement and one for the newest token; they are reserved when it is admitted, so a running request never
lacks them. While there is room, a request keeps all its rows on the GPU and nothing is ever fetched for it (resident).
When somebody needs room, residents give up all but their first pages: the rows are in host memory anyway. They may come
back to that when there is room to spare, and when what they have fetched meanwhile is as much as has to be copied.

Where further pages come from, in this order: pages of the hot pool that all slots together cannot need for their first
ones; free pages of keys (loans.py), which whoever brings new keys wants back; the rest of the hot pool, which whoever
opens a buffer wants back. First pages are never borrowed.

Hot pages are touched by the ranks' orders alone, which they carry out in line, so they change hands at once.
"""

import dataclasses

from ....memory.hisparse.shared_pool import PoolOverlay
from ....memory.index_spaces import HotPage, RequestSlot
from ....memory.pages import PageAllocator, PageGrant
from .page_lending import Loan, PageLending

FETCHED_PER_STEP = 128
"""Rows of a sequence that a step fetches when its buffer cycles, roughly: 6 % of a selection of 2,048."""


@dataclasses.dataclass(frozen=True)
class HotLimits:
    """The hot pool of a decode server: the same on all ranks. Its `num_pages` come behind those that keys lie over."""

    num_pages: int
    page_size: int
    hot_rows: int
    slots: int
    overlay: PoolOverlay | None = None

    @property
    def buffer_pages(self) -> int:
        """Pages of one buffer: its rows and that of the newest token."""
        return -(-(self.hot_rows + 1) // self.page_size)


class HotBuffer:
    """The hot rows of one request. Token p is in row p for as long as the sequence has at most `capacity` tokens; a
    longer one cycles through its first pages.
    """

    __slots__ = ("capacity", "evicting_since", "grant", "loading", "loans", "pages", "rid", "slot", "spare", "tokens")

    def __init__(self, rid: str, slot: RequestSlot, grant: PageGrant[HotPage]) -> None:
        self.rid = rid
        self.slot = slot
        self.grant = grant
        """Of the hot pool: its first pages, and perhaps further ones."""
        self.pages = list(grant.pages)
        """All that it uses, in the order of its rows."""
        self.loans: list[Loan] = []
        self.spare: list[HotPage] = []
        """Borrowed, and not in use yet; the next one last."""
        self.capacity = 0
        self.tokens = 0
        """Of the sequence, with that of the last step that was given."""
        self.evicting_since: int | None = None
        """How many tokens there were when it began to cycle; None while it is resident."""
        self.loading = False
        """Its rows are being copied there. Until they are, it gives nothing up."""

    @property
    def evicting(self) -> bool:
        return self.evicting_since is not None

    @property
    def borrowed(self) -> int:
        """Pages of keys that it has borrowed."""
        return sum(len(loan.grant.pages) for loan in self.loans)


class HotBuffers:
    """All hot buffers of a decode server."""

    def __init__(self, limits: HotLimits, loans: PageLending | None = None) -> None:
        self.limits = limits
        self.pages = PageAllocator[HotPage](
            limits.num_pages, limits.overlay.covered if limits.overlay is not None else 0
        )
        self._lending = loans
        self._free_slots = [RequestSlot(number) for number in range(limits.slots - 1, -1, -1)]
        self._buffers: dict[str, HotBuffer] = {}
        self._detached: list[HotBuffer] = []
        """Of requests that have gone, and still being written."""

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def owners(self) -> set[str]:
        """The requests that have one."""
        return set(self._buffers)

    @property
    def resident(self) -> int:
        """Requests that have all their rows on the GPU."""
        return sum(not buffer.evicting for buffer in self._buffers.values())

    def room_to_spare(self, coming: int) -> int:
        """Pages for one more resident that nobody wants soon: neither the `coming` requests, which have no buffer yet,
        nor those that are resident, for their next rows.
        """
        wanted = min(coming, len(self._free_slots)) * self.limits.buffer_pages + self.resident
        return max(0, self.pages.available - wanted) + self._lendable

    def can_open(self) -> bool:
        """Whether another request can have a buffer, if need be at the cost of residents."""
        spare = sum(self._beyond_first(buffer) for buffer in self._buffers.values())
        return bool(self._free_slots) and self.pages.available + spare >= self.limits.buffer_pages

    def open(self, rid: str, tokens: int) -> tuple[HotBuffer, list[HotBuffer]]:
        """A buffer for a sequence of `tokens`, the newest included, and the residents that had to shrink for it.

        Resident where there is room for all its tokens. Call after `can_open`.
        """
        limits = self.limits
        shrunk: list[HotBuffer] = []
        while self.pages.available < limits.buffer_pages:
            largest = max(self._buffers.values(), key=self._beyond_first)
            assert self._beyond_first(largest), f"{rid} was let in without room for its hot buffer"
            self.shrink(largest)
            shrunk.append(largest)
        wanted = -(-tokens // limits.page_size)
        first = min(wanted, limits.buffer_pages)
        grant = self.pages.grant(rid, first, reserve=limits.buffer_pages - first)
        assert grant is not None, "there was room"
        buffer = HotBuffer(rid, self._free_slots.pop(), grant)
        self._buffers[rid] = buffer
        buffer.tokens = tokens
        if self._extend(buffer, wanted - first):
            buffer.loading = True
        else:
            buffer.evicting_since = tokens
        self._set_capacity(buffer)
        return buffer, shrunk

    def worth_reopening(self, rid: str, tokens: int, room: int) -> bool:
        """Whether a request with so many `tokens` whose buffer cycles should be resident again: it has fetched about as
        much as has to be copied, and takes no more than the `room_to_spare`.
        """
        buffer = self._buffers[rid]
        if buffer.evicting_since is None or (tokens - 1 - buffer.evicting_since) * FETCHED_PER_STEP < tokens:
            return False
        return -(-tokens // self.limits.page_size) - len(buffer.pages) <= room

    def grow(self, rid: str, tokens: int) -> HotBuffer | None:
        """Make room for a sequence that has now `tokens`; the buffer where its pages or capacity have changed.

        A resident that finds no page goes on with its first ones.
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
        """Who would give most pages back; None where nobody has borrowed any."""
        borrowers = (buffer for buffer in self._buffers.values() if buffer.loans and not buffer.loading)
        return max(borrowers, key=lambda buffer: buffer.borrowed, default=None)

    @property
    def borrower_is_loading(self) -> bool:
        """Whether a buffer will be able to give loans back when its rows are there."""
        return any(buffer.loading and buffer.loans for buffer in self._buffers.values())

    def shrink(self, buffer: HotBuffer) -> None:
        """A resident goes on with its first pages; it gives back what it has borrowed."""
        self.pages.give_back(buffer.grant, self._beyond_first(buffer))
        del buffer.pages[self.limits.buffer_pages :]
        self._give_back(buffer)
        if buffer.evicting_since is None:
            buffer.evicting_since = buffer.tokens
        self._set_capacity(buffer)

    def close(self, rid: str) -> None:
        """The request has ended or was retracted; nothing happens where it has no buffer."""
        buffer = self._buffers.pop(rid, None)
        if buffer is not None:
            assert not buffer.loading, f"the hot buffer of {rid} is being written"
            self._release(buffer)

    def detach(self, rid: str) -> HotBuffer:
        """The request has gone while its buffer is `loading`: `free` it when that has ended."""
        buffer = self._buffers.pop(rid)
        self._detached.append(buffer)
        return buffer

    def free(self, buffer: HotBuffer) -> None:
        """Nothing writes this detached buffer any more."""
        self._detached.remove(buffer)
        self._release(buffer)

    def _release(self, buffer: HotBuffer) -> None:
        self.pages.release(buffer.grant)
        self._give_back(buffer)
        self._free_slots.append(buffer.slot)

    def of(self, rid: str) -> HotBuffer:
        return self._buffers[rid]

    def gauges(self) -> dict[str, float]:
        """Occupancy, for the metrics."""
        loans = [loan for buffer in self._buffers.values() for loan in buffer.loans]
        return {
            "hot_pages": self.limits.num_pages,
            "hot_pages_available": self.pages.available,
            "hot_pages_borrowed": sum(len(loan.hot_pages) for loan in loans),
            "hot_buffers": len(self),
            "hot_buffers_resident": self.resident,
        }

    def check_integrity(self, *, idle: bool) -> None:
        """Raise PageLeakError unless every hot page is accounted for."""
        self.pages.check_integrity(idle=idle)
        buffers = [*self._buffers.values(), *self._detached]
        slots = sorted([*self._free_slots, *(buffer.slot for buffer in buffers)])
        assert slots == list(range(self.limits.slots)), f"request slots are {slots}"
        for buffer in buffers:
            held = {*buffer.grant.pages, *(page for loan in buffer.loans for page in loan.hot_pages)}
            used = [*buffer.pages, *buffer.spare]
            assert held == set(used), f"the hot buffer of {buffer.rid} has pages {sorted(held)} and uses {used}"
            assert len(held) == len(used), f"the hot buffer of {buffer.rid} uses a page twice: {used}"
            first = buffer.pages[: self.limits.buffer_pages]
            assert buffer.grant.pages[: len(first)] == first, f"first pages of {buffer.rid} are not its own: {first}"

    @property
    def _unneeded(self) -> int:
        """Free pages of the hot pool that no buffer can want, however many are opened."""
        return max(0, self.pages.available - len(self._free_slots) * self.limits.buffer_pages)

    @property
    def _lendable(self) -> int:
        return self._lending.room if self._lending is not None else 0

    def _extend(self, buffer: HotBuffer, count: int) -> bool:
        """Give a resident `count` pages behind its first ones; False, and nothing has changed, where there are not as
        many.
        """
        missing = count - min(count, len(buffer.spare))
        room = self._lendable
        if missing > self.pages.available + room:
            return False
        borrowed = min(max(0, missing - self._unneeded), room)
        buffer.pages += [buffer.spare.pop() for _ in range(count - missing)]
        self._take_own(buffer, missing - borrowed)
        if borrowed:
            assert self._lending is not None
            loan = self._lending.borrow(buffer.rid, borrowed)
            buffer.loans.append(loan)
            buffer.pages += loan.hot_pages[:borrowed]
            buffer.spare = loan.hot_pages[: borrowed - 1 : -1]
        return True

    def _take_own(self, buffer: HotBuffer, count: int) -> None:
        for _ in range(count):
            grown = self.pages.grow(buffer.grant)
            assert grown, "there was room"
            buffer.pages.append(buffer.grant.pages[-1])

    def _give_back(self, buffer: HotBuffer) -> None:
        for loan in buffer.loans:
            assert self._lending is not None
            self._lending.give_back(loan)
        buffer.loans, buffer.spare = [], []

    def _set_capacity(self, buffer: HotBuffer) -> None:
        rows = 0 if buffer.evicting else len(buffer.pages) * self.limits.page_size
        buffer.capacity = max(self.limits.hot_rows, rows)

    def _beyond_first(self, buffer: HotBuffer) -> int:
        """Pages of the hot pool that it would give up."""
        return 0 if buffer.loading else max(0, len(buffer.grant.pages) - self.limits.buffer_pages)
