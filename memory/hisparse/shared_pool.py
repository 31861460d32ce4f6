"""GPU memory that serves as indexer keys or as hot rows, as needed (HiSparse): the two pools overlap.

    bytes         0                                                        keys end here
    KvPage        |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |  8  | ...   |
    LocalHotPage  |            0            |            1              | ...     |  the hot pool's own ...
    unit          |                         0                           | ...

Both pools start at the beginning of one allocation. The hot pool is longer: its pages after the end of the keys are its
own. When all KvPages of a unit are free, they can be lent to hot buffers, as the HotPages of that unit.

On one rank a unit is the smallest span that is whole pages of both pools. Page ids are the same on all ranks, but if
layers share indexers, pipeline stages may have different numbers of indexers, so their pages differ in size. Then a
unit is a number of KvPages, with as many hot pages as lie wholly inside them on every rank. HotPages are numbered unit
by unit; from `covered` on they are the hot pool's own. Each rank maps them to its own LocalHotPages.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import cast

from ...common.arithmetic import ceil_div
from ..index_spaces import HotPage, KvPage, LocalHotPage

MAX_UNIT_PAGES = 128
"""Larger units would seldom be wholly free. If a unit of whole pages would be larger, a shorter one is used, which
wastes part of a hot page at each end.
"""
MIN_UNIT_USE = Fraction(7, 8)
"""A shorter unit is the shortest one in which hot pages use at least this share of the KvPages, on the rank with the
largest hot pages.
"""


@dataclasses.dataclass(frozen=True)
class PoolOverlay:
    """How KvPages and HotPages overlap: on one rank, or as agreed by all ranks of a server."""

    num_pages: int
    """KvPages of the pool."""
    kv_pages: int
    """KvPages of one unit."""
    hot_pages: int
    """HotPages of one unit."""
    covered: int
    """HotPages that overlap keys, on the rank with the fewest. From here on they are the hot pool's own."""

    @classmethod
    def of(cls, num_pages: int, *, kv_page_bytes: int, hot_page_bytes: int) -> "PoolOverlay":
        """The overlay of one rank with `num_pages` pages of keys; sizes are bytes of a page in its device memory."""
        unit_bytes = math.lcm(kv_page_bytes, hot_page_bytes)
        covered = ceil_div(num_pages * kv_page_bytes, hot_page_bytes)
        return cls(num_pages, unit_bytes // kv_page_bytes, unit_bytes // hot_page_bytes, covered)

    @classmethod
    def agreed(cls, of_ranks: "Sequence[PoolOverlay]") -> "PoolOverlay":
        """The overlay that is valid on all ranks. They have the same KvPages, and equally many hot pages after them."""
        first = of_ranks[0]
        if all(overlay == first for overlay in of_ranks) and first.kv_pages <= MAX_UNIT_PAGES:
            return first
        largest_ratio = max(Fraction(overlay.kv_pages, overlay.hot_pages) for overlay in of_ranks)
        sizes = (
            (size, min(overlay._hot_pages_within(size) for overlay in set(of_ranks))) for size in itertools.count(1)
        )
        kv_pages, hot_pages = next((kv, hot) for kv, hot in sizes if hot * largest_ratio >= kv * MIN_UNIT_USE)
        return cls(first.num_pages, kv_pages, hot_pages, min(overlay.covered for overlay in of_ranks))

    @property
    def count(self) -> int:
        """Number of whole units."""
        return self.num_pages // self.kv_pages

    def hot_pages_under(self, pages: Sequence[KvPage]) -> list[HotPage]:
        """The HotPages of these KvPages, which must be whole units."""
        firsts = [page for page in pages if page % self.kv_pages == 0]
        assert len(pages) == len(firsts) * self.kv_pages, f"{len(pages)} pages are not whole units of {self.kv_pages}"
        numbers = [page // self.kv_pages * self.hot_pages + at for page in firsts for at in range(self.hot_pages)]
        return cast("list[HotPage]", numbers)

    def local_pages(self, hot_pages: Sequence[HotPage], agreed: "PoolOverlay") -> Sequence[LocalHotPage]:
        """The pages of this rank for HotPages of the `agreed` overlay."""
        if self == agreed:
            return cast("Sequence[LocalHotPage]", hot_pages)
        return [self._local_page(page, agreed) for page in hot_pages]

    def _local_page(self, page: HotPage, agreed: "PoolOverlay") -> LocalHotPage:
        if page >= agreed.covered:
            return LocalHotPage(page - agreed.covered + self.covered)
        unit, at = divmod(page, agreed.hot_pages)
        first_whole = ceil_div(unit * agreed.kv_pages * self.hot_pages, self.kv_pages)
        return LocalHotPage(first_whole + at)

    def _hot_pages_within(self, kv_pages: int) -> int:
        """Whole hot pages inside any span of `kv_pages` KvPages that starts at a multiple of `kv_pages`."""
        whole, rest = divmod(kv_pages * self.hot_pages, self.kv_pages)
        return whole - 1 if rest else whole
