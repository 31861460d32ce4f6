"""Who has how many rows on the GPU when the KV is in host memory (HiSparse). Plain integers, no tensors.

Every running request has a hot buffer: a request slot and pages of the hot pool. Its first pages hold `hot_rows` rows
under LRU replacement and one for the newest token; they are reserved when it is admitted, so a running request never
lacks them. While the hot pool has room, a request keeps all its rows there and nothing is ever fetched for it
(resident). When somebody needs room, residents give up all but their first pages: the rows are in host memory anyway.

Hot pages are touched by the ranks' orders alone, which they carry out in line, so they change hands at once.
"""

import dataclasses

from ..memory.index_spaces import HotPage, RequestSlot
from ..memory.pages import PageAllocator, PageGrant


@dataclasses.dataclass(frozen=True)
class HotLimits:
    """The hot pool of a decode server: the same on all ranks."""

    num_pages: int
    page_size: int
    hot_rows: int
    slots: int

    @property
    def buffer_pages(self) -> int:
        """Pages of one buffer: its rows and that of the newest token."""
        return -(-(self.hot_rows + 1) // self.page_size)


class HotBuffer:
    """The hot rows of one request. Token p is in row p for as long as the sequence has at most `capacity` tokens; a
    longer one cycles through its first pages.
    """

    __slots__ = ("capacity", "cycles", "grant", "rid", "slot")

    def __init__(self, rid: str, slot: RequestSlot, grant: PageGrant[HotPage], capacity: int, *, cycles: bool) -> None:
        self.rid = rid
        self.slot = slot
        self.grant = grant
        self.capacity = capacity
        self.cycles = cycles

    @property
    def pages(self) -> list[HotPage]:
        return self.grant.pages


class HotBuffers:
    """All hot buffers of a decode server."""

    def __init__(self, limits: HotLimits) -> None:
        self.limits = limits
        self.pages = PageAllocator[HotPage](limits.num_pages)
        self._free_slots = [RequestSlot(number) for number in range(limits.slots - 1, -1, -1)]
        self._buffers: dict[str, HotBuffer] = {}

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def owners(self) -> set[str]:
        """The requests that have one."""
        return set(self._buffers)

    @property
    def resident(self) -> int:
        """Requests that have all their rows on the GPU."""
        return sum(not buffer.cycles for buffer in self._buffers.values())

    def can_open(self) -> bool:
        """Whether another request can have a buffer, if need be at the cost of residents."""
        spare = sum(len(self._beyond_first(buffer)) for buffer in self._buffers.values())
        return bool(self._free_slots) and self.pages.available + spare >= self.limits.buffer_pages

    def open(self, rid: str, tokens: int) -> tuple[HotBuffer, list[HotBuffer]]:
        """A buffer for a sequence of `tokens`, the newest included, and the residents that had to shrink for it.

        Resident where there is room for all its tokens. Call after `can_open`.
        """
        limits = self.limits
        shrunk: list[HotBuffer] = []
        while self.pages.available < limits.buffer_pages:
            largest = max(self._buffers.values(), key=lambda buffer: len(buffer.pages))
            assert self._beyond_first(largest), f"{rid} was let in without room for its hot buffer"
            self._shrink(largest)
            shrunk.append(largest)
        wanted = -(-tokens // limits.page_size)
        cycles = tokens > limits.hot_rows and wanted > self.pages.available
        held = limits.buffer_pages if cycles else wanted
        grant = self.pages.grant(rid, held, reserve=max(0, limits.buffer_pages - held))
        assert grant is not None, "there was room"
        buffer = HotBuffer(rid, self._free_slots.pop(), grant, limits.hot_rows, cycles=cycles)
        self._buffers[rid] = buffer
        self._set_capacity(buffer)
        return buffer, shrunk

    def grow(self, rid: str, tokens: int) -> HotBuffer | None:
        """Make room for a sequence that has now `tokens`; the buffer where its pages or capacity have changed.

        A resident that finds no page goes on with its first ones.
        """
        buffer = self._buffers[rid]
        if buffer.cycles or tokens <= len(buffer.pages) * self.limits.page_size:
            return None
        while len(buffer.pages) * self.limits.page_size < tokens:
            if not self.pages.grow(buffer.grant):
                self._shrink(buffer)
                return buffer
        self._set_capacity(buffer)
        return buffer

    def close(self, rid: str) -> None:
        """The request has ended or was retracted; nothing happens where it has no buffer."""
        buffer = self._buffers.pop(rid, None)
        if buffer is not None:
            self.pages.release(buffer.grant)
            self._free_slots.append(buffer.slot)

    def of(self, rid: str) -> HotBuffer:
        return self._buffers[rid]

    def gauges(self) -> dict[str, float]:
        """Occupancy, for the metrics."""
        return {
            "hot_pages": self.limits.num_pages,
            "hot_pages_available": self.pages.available,
            "hot_buffers": len(self),
            "hot_buffers_resident": self.resident,
        }

    def check_integrity(self, *, idle: bool) -> None:
        """Raise PageLeakError unless every hot page is accounted for."""
        self.pages.check_integrity(idle=idle)
        slots = sorted([*self._free_slots, *(buffer.slot for buffer in self._buffers.values())])
        assert slots == list(range(self.limits.slots)), f"request slots are {slots}"

    def _shrink(self, buffer: HotBuffer) -> None:
        """Take all pages but the first ones."""
        self.pages.give_back(buffer.grant, len(self._beyond_first(buffer)))
        buffer.cycles = True
        self._set_capacity(buffer)

    def _set_capacity(self, buffer: HotBuffer) -> None:
        rows = 0 if buffer.cycles else len(buffer.pages) * self.limits.page_size
        buffer.capacity = max(self.limits.hot_rows, rows)

    def _beyond_first(self, buffer: HotBuffer) -> list[HotPage]:
        return buffer.pages[self.limits.buffer_pages :]
