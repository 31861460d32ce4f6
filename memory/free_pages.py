"""The pages of a pool that are free, and which whole lots of them are (lots.py)."""

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar, cast

PageT = TypeVar("PageT", bound=int)


class FreePages(Generic[PageT]):
    """Hands out the lowest page first: what is in use stays together. Neighbours travel as one write, and at the other
    end whole lots stay free, which are handed out from the highest.
    """

    def __init__(self, pages: range) -> None:
        # here, and nowhere else, a number becomes a page
        self._pages = cast("set[PageT]", set(pages))
        self._queue = cast("list[PageT]", list(pages))
        """A heap of all free pages, and of some that were handed out as part of a lot."""
        self._queued = bytearray(pages.stop)
        self._queued[pages.start :] = b"\1" * len(pages)
        self._lot_pages = 0
        self._free_of_lot: list[int] = []
        self._whole_lots: set[int] = set()

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[PageT]:
        return iter(self._pages)

    @property
    def overlay(self) -> int:
        """PoolOverlay that are free as a whole."""
        return len(self._whole_lots)

    def divide(self, lot_pages: int) -> None:
        """From now on, lot n is pages [n * lot_pages, (n + 1) * lot_pages). All pages are free."""
        self._lot_pages = lot_pages
        self._whole_lots = set(range(len(self) // lot_pages))
        self._free_of_lot = [lot_pages] * len(self._whole_lots)
        if len(self) % lot_pages:
            self._free_of_lot.append(len(self) % lot_pages)

    def add(self, page: PageT) -> None:
        """This page is free again."""
        assert page not in self._pages, f"page {page} is free already"
        self._pages.add(page)
        if not self._queued[page]:
            self._queued[page] = True
            heapq.heappush(self._queue, page)
        if self._lot_pages:
            lot = page // self._lot_pages
            self._free_of_lot[lot] += 1
            if self._free_of_lot[lot] == self._lot_pages:
                self._whole_lots.add(lot)

    def pop(self) -> PageT:
        """Take the lowest; there is one."""
        while True:
            page = heapq.heappop(self._queue)
            self._queued[page] = False
            if page in self._pages:
                break
        self._pages.remove(page)
        if self._lot_pages:
            lot = page // self._lot_pages
            self._free_of_lot[lot] -= 1
            self._whole_lots.discard(lot)
        return page

    def pop_lots(self, count: int) -> list[PageT]:
        """Take the pages of the `count` highest lots that are free, in ascending order; there are as many."""
        taken: list[int] = []
        for lot in sorted(heapq.nlargest(count, self._whole_lots)):
            self._free_of_lot[lot] = 0
            self._whole_lots.remove(lot)
            taken += range(lot * self._lot_pages, (lot + 1) * self._lot_pages)
        pages = cast("list[PageT]", taken)
        self._pages.difference_update(pages)
        return pages
