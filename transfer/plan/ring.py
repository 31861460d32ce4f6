"""The allocator of a staging ring. Arithmetic only: no memory, no sockets, no clock.

Credit based: a region is granted when its bytes are free; until then the request waits in a FIFO queue. So a writer
with a grant may write at once, and nothing is broadcast.

Positions are virtual byte addresses that only grow: `offset = position % capacity`, and a region never crosses the end
of the buffer. Each grant starts at or after the end of the previous one, so a position identifies one region and is
never reused. Regions are freed in any order; a region that is held for long (its writer hangs) is skipped and costs
only its own bytes.
"""

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, NewType, TypeVar

from ...common.arithmetic import round_up

ALIGNMENT: Final = 256
"""Regions start at and fill multiples of this: 16-byte accesses and whole cache lines on the GPU."""

Position = NewType("Position", int)
"""The virtual address of a region, which identifies it. Bytes; reaches 2**63 after 5 years at 50 GB/s."""

Owner = TypeVar("Owner", bound=Hashable)


def aligned(size_bytes: int) -> int:
    """The size, rounded up to a multiple of ALIGNMENT."""
    return round_up(size_bytes, ALIGNMENT)


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes [offset, offset + size_bytes) of the buffer."""

    position: Position
    offset: int
    size_bytes: int


class StagingRing(Generic[Owner]):
    """Grants regions of a buffer of `capacity_bytes`. An owner is any hashable value that identifies a request.

    An idle ring grants any request up to its capacity at once.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes <= 0 or capacity_bytes % ALIGNMENT:
            raise ValueError(f"a ring's capacity must be a positive multiple of {ALIGNMENT}, got {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        self._head = 0
        self._waiting: OrderedDict[Owner, int] = OrderedDict()  # sizes; removing the first entry of a dict is slow
        self._offsets: list[int] = []  # of the live regions, ascending
        self._live: dict[int, Region] = {}  # by offset

    @property
    def waiting(self) -> int:
        """Requests that have no region yet."""
        return len(self._waiting)

    @property
    def granted_bytes(self) -> int:
        return sum(region.size_bytes for region in self._live.values())

    def request(self, owner: Owner, size_bytes: int) -> None:
        """Queue a request for grant(). Raises ValueError, and changes nothing, if it can never be granted."""
        if not 0 < size_bytes <= self.capacity_bytes:
            raise ValueError(f"a region has 1 to {self.capacity_bytes} bytes, got {size_bytes}")
        if owner in self._waiting:
            raise ValueError(f"{owner} is already waiting")
        self._waiting[owner] = aligned(size_bytes)

    def withdraw(self, owner: Owner) -> bool:
        """Remove a queued request; False if there is none."""
        return self._waiting.pop(owner, None) is not None

    def grant(self) -> list[tuple[Owner, Region]]:
        """Grant queued requests in order, as long as they fit. Smaller requests do not overtake a large one."""
        granted = []
        while self._waiting:
            owner, size_bytes = next(iter(self._waiting.items()))
            position = self._place(size_bytes)
            if position is None:
                break
            del self._waiting[owner]
            self._head = position + size_bytes
            region = Region(Position(position), position % self.capacity_bytes, size_bytes)
            insort(self._offsets, region.offset)
            self._live[region.offset] = region
            granted.append((owner, region))
        return granted

    def free(self, position: Position) -> bool:
        """Free a region. Returns False, and changes nothing, if it is not live: freeing twice is harmless."""
        region = self._live.get(position % self.capacity_bytes)
        if region is None or region.position != position:
            return False
        self._offsets.remove(region.offset)
        del self._live[region.offset]
        return True

    def check_integrity(self) -> None:
        """Live regions are inside the buffer, aligned and disjoint; no request waits for an empty ring."""
        end = 0
        assert sorted(self._live) == self._offsets
        for offset in self._offsets:
            region = self._live[offset]
            assert region.offset == offset == region.position % self.capacity_bytes, region
            assert region.position + region.size_bytes <= self._head, region
            assert offset % ALIGNMENT == 0, region
            assert end <= offset, f"{region} overlaps the region before it"
            end = offset + region.size_bytes
        assert end <= self.capacity_bytes, "a region exceeds the buffer"
        assert self._live or not self._waiting, "a request waits for an empty ring: grant() was not called"

    def _place(self, size_bytes: int) -> int | None:
        """The first position from the head on, within one round of the buffer, where this many bytes are free."""
        position = self._head
        while position < self._head + self.capacity_bytes:
            start, offset = position - position % self.capacity_bytes, position % self.capacity_bytes
            if offset + size_bytes > self.capacity_bytes:
                position = start + self.capacity_bytes
                continue
            obstacle = self._obstacle(offset, size_bytes)
            if obstacle is None:
                return position
            position = start + obstacle.offset + obstacle.size_bytes
        return None

    def _obstacle(self, offset: int, size_bytes: int) -> Region | None:
        """A live region that overlaps [offset, offset + size_bytes)."""
        after = bisect_right(self._offsets, offset)
        if after:
            before = self._live[self._offsets[after - 1]]
            if before.offset + before.size_bytes > offset:
                return before
        if after < len(self._offsets) and self._offsets[after] < offset + size_bytes:
            return self._live[self._offsets[after]]
        return None
