"""Memory of the GPU that is index keys or hot rows, as needed (HiSparse): the two pools lie over each other.

    bytes     0                                                        keys end here
    KvPage    |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |  8  | ...   |
    HotPage   |            0            |            1              | ...     |  the hot pool's own ...
    Lot       |                         0                           | ...

Both begin where their one allocation does. The pool of keys is as long as it has to be; the hot pool goes on to the
end, and what is behind the keys is its own. A lot is the least memory that is whole pages of both. While nobody has any
of its KvPages, all of them can be lent, as its HotPages, to hot buffers.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import cast

from .index_spaces import HotPage, KvPage


@dataclasses.dataclass(frozen=True)
class Lots:
    """How KvPages and HotPages of a server overlap."""

    kv_pages: int
    """Of one lot."""
    hot_pages: int
    """Of one lot."""
    count: int
    """Whole lots that there are."""
    covered: int
    """HotPages that keys reach into. Those from here on are the hot pool's own."""

    @classmethod
    def of(cls, num_pages: int, *, kv_page_bytes: int, hot_page_bytes: int) -> "Lots":
        """The lots of `num_pages` pages of keys; sizes are those of a page in device memory, on one rank."""
        lot_bytes = math.lcm(kv_page_bytes, hot_page_bytes)
        kv_pages = lot_bytes // kv_page_bytes
        covered = -(-num_pages * kv_page_bytes // hot_page_bytes)
        return cls(kv_pages, lot_bytes // hot_page_bytes, num_pages // kv_pages, covered)

    @classmethod
    def agreed(cls, of_ranks: "Sequence[Lots]") -> "Lots":
        """What holds on all ranks: a page id means the same everywhere. Where they differ there is nothing to lend."""
        first = of_ranks[0]
        if all(lots == first for lots in of_ranks):
            return first
        return dataclasses.replace(first, count=0, covered=max(lots.covered for lots in of_ranks))

    def hot_pages_under(self, pages: Sequence[KvPage]) -> list[HotPage]:
        """The HotPages of these KvPages, which are whole lots."""
        firsts = [page for page in pages if page % self.kv_pages == 0]
        assert len(pages) == len(firsts) * self.kv_pages, f"{len(pages)} pages are no lots of {self.kv_pages}"
        numbers = [page // self.kv_pages * self.hot_pages + at for page in firsts for at in range(self.hot_pages)]
        return cast("list[HotPage]", numbers)
