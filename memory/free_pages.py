"""The free pages of a pool, and which whole units (hisparse/shared_pool.py) are free."""

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar, cast

PageT = TypeVar("PageT", bound=int)


class FreePages(Generic[PageT]):
    """Hands out the lowest page first, so that used pages stay together: adjacent pages are transferred as one write,
    and whole units stay free at the upper end, where `pop_units` takes them.
    """

    def __init__(self, pages: range) -> None:
        # the only place where a number becomes a page
        self._pages = cast("set[PageT]", set(pages))
        self._queue = cast("list[PageT]", list(pages))
        """A heap of all free pages; also holds pages that `pop_units` took, which `pop` skips."""
        self._queued = bytearray(pages.stop)
        self._queued[pages.start :] = b"\1" * len(pages)
        self._unit_pages = 0
        self._free_in_unit: list[int] = []
        self._whole_units: set[int] = set()

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[PageT]:
        return iter(self._pages)

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
        assert page not in self._pages, f"page {page} is free already"
        self._pages.add(page)
        if not self._queued[page]:
            self._queued[page] = True
            heapq.heappush(self._queue, page)
        if self._unit_pages:
            unit = page // self._unit_pages
            self._free_in_unit[unit] += 1
            if self._free_in_unit[unit] == self._unit_pages:
                self._whole_units.add(unit)

    def pop(self) -> PageT:
        """Take the lowest page. At least one must be free."""
        while True:
            page = heapq.heappop(self._queue)
            self._queued[page] = False
            if page in self._pages:
                break
        self._pages.remove(page)
        if self._unit_pages:
            unit = page // self._unit_pages
            self._free_in_unit[unit] -= 1
            self._whole_units.discard(unit)
        return page

    def pop_units(self, count: int) -> list[PageT]:
        """Take the pages of the `count` highest whole units, ascending. At least `count` must be free."""
        taken: list[int] = []
        for unit in sorted(heapq.nlargest(count, self._whole_units)):
            self._free_in_unit[unit] = 0
            self._whole_units.remove(unit)
            taken += range(unit * self._unit_pages, (unit + 1) * self._unit_pages)
        pages = cast("list[PageT]", taken)
        self._pages.difference_update(pages)
        return pages
