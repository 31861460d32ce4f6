"""Which bytes of the staging buffer belong to whom. Arithmetic only: no memory, no sockets, no clock.

Credit based: a region is granted when its bytes are free and not before, and until then the request waits its turn,
first come first served. So a writer never has to ask whether it may write yet, and nothing is broadcast.

Positions count bytes on an endless tape wound round the buffer: `offset = position % capacity`, and a region never
crosses the end of the buffer. Each grant starts at or after the end of the last one, so a position names one region for
ever. Regions are freed in any order; where one is held for long (its writer hangs), the tape skips over it, and it
costs its own bytes only.
"""

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, NewType, TypeVar

ALIGNMENT: Final = 256
"""Regions start at and fill multiples of this: 16-byte accesses and whole cache lines on the GPU."""

Position = NewType("Position", int)
"""Where a region starts on the tape: its name. Bytes; reaches 2**63 after 5 years at 50 GB/s."""

Owner = TypeVar("Owner", bound=Hashable)


def aligned(size_bytes: int) -> int:
    """The size, rounded up to a multiple of ALIGNMENT."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes [offset, offset + size_bytes) of the buffer."""

    position: Position
    offset: int
    size_bytes: int


class StagingRing(Generic[Owner]):
    """Grants regions of a buffer of `capacity_bytes` to owners, who are whatever the caller names them by.

    `epoch` tells this ring from an earlier one at the same address: it travels with every grant and must come back.
    An idle ring grants any request up to its capacity at once.
    """

    def __init__(self, capacity_bytes: int, *, epoch: int) -> None:
        if capacity_bytes <= 0 or capacity_bytes % ALIGNMENT:
            raise ValueError(f"a ring's capacity must be a positive multiple of {ALIGNMENT}, got {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        self.epoch = epoch
        self._head = 0
        self._waiting: OrderedDict[Owner, int] = OrderedDict()  # size; a dict is slow at giving up its first entry
        self._offsets: list[int] = []  # of the live regions, ascending
        self._live: dict[int, Region] = {}  # by offset

    @property
    def idle(self) -> bool:
        return not self._live and not self._waiting

    @property
    def waiting(self) -> int:
        """Requests that have no region yet."""
        return len(self._waiting)

    @property
    def granted_bytes(self) -> int:
        return sum(region.size_bytes for region in self._live.values())

    def request(self, owner: Owner, size_bytes: int) -> None:
        """Queue a request; grant() answers it. Raises ValueError, and changes nothing, when it can never be granted."""
        if not 0 < size_bytes <= self.capacity_bytes:
            raise ValueError(f"a region has 1 to {self.capacity_bytes} bytes, not {size_bytes}")
        if owner in self._waiting:
            raise ValueError(f"{owner} is already waiting")
        self._waiting[owner] = aligned(size_bytes)

    def withdraw(self, owner: Owner) -> bool:
        """Forget a request that waits; False when there is none."""
        return self._waiting.pop(owner, None) is not None

    def grant(self) -> list[tuple[Owner, Region]]:
        """Regions for those who waited longest, as far as they fit. A large request is not passed by smaller ones."""
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
        """Give a region back. False, and nothing happens, for one that is not live: freeing twice is harmless."""
        region = self._live.get(position % self.capacity_bytes)
        if region is None or region.position != position:
            return False
        self._offsets.remove(region.offset)
        del self._live[region.offset]
        return True

    def check_integrity(self) -> None:
        """Live regions are inside the buffer, aligned and apart; the first in the queue really has to wait."""
        end = 0
        assert sorted(self._live) == self._offsets
        for offset in self._offsets:
            region = self._live[offset]
            assert region.offset == offset == region.position % self.capacity_bytes, region
            assert region.position + region.size_bytes <= self._head, region
            assert offset % ALIGNMENT == 0, region
            assert end <= offset, f"{region} overlaps the region before it"
            end = offset + region.size_bytes
        assert end <= self.capacity_bytes, "a region leaves the buffer"
        assert self._live or not self._waiting, "a request waits for an empty ring: grant() was not called"

    def _place(self, size_bytes: int) -> int | None:
        """The first position from the head on, within one turn of the tape, where this many bytes are free."""
        position = self._head
        while position < self._head + self.capacity_bytes:
            turn, offset = position - position % self.capacity_bytes, position % self.capacity_bytes
            if offset + size_bytes > self.capacity_bytes:
                position = turn + self.capacity_bytes
                continue
            obstacle = self._obstacle(offset, size_bytes)
            if obstacle is None:
                return position
            position = turn + obstacle.offset + obstacle.size_bytes
        return None

    def _obstacle(self, offset: int, size_bytes: int) -> Region | None:
        """A live region that shares a byte with [offset, offset + size_bytes)."""
        after = bisect_right(self._offsets, offset)
        if after:
            before = self._live[self._offsets[after - 1]]
            if before.offset + before.size_bytes > offset:
                return before
        if after < len(self._offsets) and self._offsets[after] < offset + size_bytes:
            return self._live[self._offsets[after]]
        return None
