"""The free pages of a pool, and which whole units (hisparse/shared_pool.py) are free."""

import heapq
import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar, cast

MANY = 256
"""So many pages are searched for in the whole pool, at C's speed: popping those of a long prompt takes 40 ms."""
PageT = TypeVar("PageT", bound=int)
"""KvPage or HotPage (index_spaces.py)."""


class FreePages(Generic[PageT]):
    """Hands out the lowest page first, so that used pages stay together: adjacent pages are transferred as one write,
    and whole units stay free at the upper end, where `pop_units` takes them.

    A pool can have millions of pages, most of which are never used: only those below the highest that `take` has taken
    are queued.
    """

    def __init__(self, pages: range) -> None:
        self._range = pages
        self._count = len(pages)
        self._is_free = bytearray(pages.stop)
        self._is_free[pages.start :] = b"\1" * len(pages)
        self._queue: list[PageT] = []
        """A heap of the free pages below `_unqueued`; also holds pages that were taken otherwise, which are skipped."""
        self._queued = bytearray(pages.stop)
        self._unqueued = pages.start
        self._unit_pages = 0
        self._free_in_unit: list[int] = []
        self._whole_units: set[int] = set()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[PageT]:
        return cast("Iterator[PageT]", itertools.compress(range(self._range.stop), self._is_free))

    @property
    def whole_units(self) -> int:
        """Units of which every page is free."""
        return len(self._whole_units)

    def divide(self, unit_pages: int) -> None:
        """Define unit n as pages [n * unit_pages, (n + 1) * unit_pages). All pages must be free."""
        self._unit_pages = unit_pages
        self._whole_units = set(range(len(self) // unit_pages))
        self._free_in_unit = [unit_pages] * len(self._whole_units)
        if len(self) % unit_pages:
            self._free_in_unit.append(len(self) % unit_pages)

    def add(self, page: PageT) -> None:
        """Return `page` to the free pages."""
        assert not self._is_free[page], f"page {page} is free already"
        self._is_free[page] = True
        self._count += 1
        if page < self._unqueued and not self._queued[page]:
            self._queued[page] = True
            heapq.heappush(self._queue, page)
        if self._unit_pages:
            unit = page // self._unit_pages
            self._free_in_unit[unit] += 1
            if self._free_in_unit[unit] == self._unit_pages:
                self._whole_units.add(unit)

    def take(self, count: int) -> list[PageT]:
        """Take the lowest pages, ascending. At least `count` must be free."""
        if count < MANY:
            taken = [self._pop_lowest() for _ in range(count)]
        else:
            taken = list(itertools.islice(self, count))
            self._unqueued = max(self._unqueued, taken[-1] + 1)
            for page in taken:
                self._is_free[page] = False
        self._count -= count
        if self._unit_pages:
            for page in taken:
                unit = page // self._unit_pages
                self._free_in_unit[unit] -= 1
                self._whole_units.discard(unit)
        return taken

    def pop_units(self, count: int) -> list[PageT]:
        """Take the pages of the `count` highest whole units, ascending. At least `count` must be free."""
        taken: list[int] = []
        for unit in sorted(heapq.nlargest(count, self._whole_units)):
            self._free_in_unit[unit] = 0
            self._whole_units.remove(unit)
            pages = range(unit * self._unit_pages, (unit + 1) * self._unit_pages)
            self._is_free[pages.start : pages.stop] = bytes(len(pages))
            taken += pages
        self._count -= len(taken)
        return cast("list[PageT]", taken)

    def _pop_lowest(self) -> PageT:
        while self._queue:
            page = heapq.heappop(self._queue)
            self._queued[page] = False
            if self._is_free[page]:
                self._is_free[page] = False
                return page
        found = self._is_free.index(1, self._unqueued)
        self._unqueued = found + 1
        self._is_free[found] = False
        return cast("PageT", found)
