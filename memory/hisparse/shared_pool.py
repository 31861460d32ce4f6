"""Memory of the GPU that is index keys or hot rows, as needed (HiSparse): the two pools lie over each other.

    bytes     0                                                        keys end here
    KvPage    |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |  8  | ...   |
    HotPlace  |            0            |            1              | ...     |  the hot pool's own ...
    Lot       |                         0                           | ...

Both begin where their one allocation does. The pool of keys is as long as it has to be; the hot pool goes on to the
end, and what is behind the keys is its own. While nobody has any of a lot's KvPages, all of them can be lent, as its
HotPages, to hot buffers.

On one rank a lot is the least memory that is whole pages of both. Page ids mean the same on all ranks, and where layers
share indexers, pipeline stages have more or fewer of them: then a lot is a number of KvPages, and as many hot pages as
lie wholly in those on every rank. HotPages are numbered lot by lot, and from `covered` on are the hot pool's own; each
rank has its own places for them.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import cast

from ..index_spaces import HotPage, HotPlace, KvPage

MOST_LOT_PAGES = 128
"""PoolOverlay of more KvPages would seldom be free as a whole: shorter ones are agreed on, which lose a part of a hot
page at either end.
"""
LEAST_USE = Fraction(7, 8)
"""They are as short as they can be with so much of their KvPages in use on the rank with the largest hot pages."""


@dataclasses.dataclass(frozen=True)
class PoolOverlay:
    """How KvPages and HotPages overlap: on one rank, or as all ranks of a server have agreed."""

    num_pages: int
    """KvPages that there are."""
    kv_pages: int
    """Of one lot."""
    hot_pages: int
    """Of one lot."""
    covered: int
    """HotPages that keys reach into, on the rank where these are fewest. From here on they are the hot pool's own."""

    @classmethod
    def of(cls, num_pages: int, *, kv_page_bytes: int, hot_page_bytes: int) -> "PoolOverlay":
        """The lots of `num_pages` pages of keys on one rank; sizes are those of a page in its device memory."""
        lot_bytes = math.lcm(kv_page_bytes, hot_page_bytes)
        covered = -(-num_pages * kv_page_bytes // hot_page_bytes)
        return cls(num_pages, lot_bytes // kv_page_bytes, lot_bytes // hot_page_bytes, covered)

    @classmethod
    def agreed(cls, of_ranks: "Sequence[PoolOverlay]") -> "PoolOverlay":
        """What holds on all ranks. They have the same KvPages, and as many hot pages behind them."""
        first = of_ranks[0]
        if all(overlay == first for overlay in of_ranks) and first.kv_pages <= MOST_LOT_PAGES:
            return first
        dearest = max(Fraction(overlay.kv_pages, overlay.hot_pages) for overlay in of_ranks)
        sizes = (
            (size, min(overlay._hot_pages_within(size) for overlay in set(of_ranks))) for size in itertools.count(1)
        )
        kv_pages, hot_pages = next((kv, hot) for kv, hot in sizes if hot * dearest >= kv * LEAST_USE)
        return cls(first.num_pages, kv_pages, hot_pages, min(overlay.covered for overlay in of_ranks))

    @property
    def count(self) -> int:
        """Whole lots that there are."""
        return self.num_pages // self.kv_pages

    def hot_pages_under(self, pages: Sequence[KvPage]) -> list[HotPage]:
        """The HotPages of these KvPages, which are whole lots."""
        firsts = [page for page in pages if page % self.kv_pages == 0]
        assert len(pages) == len(firsts) * self.kv_pages, f"{len(pages)} pages are no lots of {self.kv_pages}"
        numbers = [page // self.kv_pages * self.hot_pages + at for page in firsts for at in range(self.hot_pages)]
        return cast("list[HotPage]", numbers)

    def places(self, hot_pages: Sequence[HotPage], agreed: "PoolOverlay") -> Sequence[HotPlace]:
        """Where this rank, whose lots these are, has HotPages of the `agreed` ones."""
        if self == agreed:
            return cast("Sequence[HotPlace]", hot_pages)
        return [self._place(page, agreed) for page in hot_pages]

    def _place(self, page: HotPage, agreed: "PoolOverlay") -> HotPlace:
        if page >= agreed.covered:
            return HotPlace(page - agreed.covered + self.covered)
        lot, at = divmod(page, agreed.hot_pages)
        first_whole = -(-lot * agreed.kv_pages * self.hot_pages // self.kv_pages)
        return HotPlace(first_whole + at)

    def _hot_pages_within(self, kv_pages: int) -> int:
        """Whole hot pages of a rank that lie in `kv_pages` KvPages, from any multiple of as many on."""
        whole, rest = divmod(kv_pages * self.hot_pages, self.kv_pages)
        return whole - 1 if rest else whole
