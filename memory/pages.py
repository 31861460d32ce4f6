"""Accounting of the pages of a pool: plain integers, no tensors.

A page is free, held by one or more grants, or idle: kept by the prefix cache without a holder. Idle pages are evicted,
oldest first, when free ones run out, so they count as available. Admission reserves pages for growth, which a request
takes one by one as it generates: a reserved page is always available. `check_integrity()` verifies the accounting.

A pool that is divided into units (hisparse/shared_pool.py) can lend whole free units: until such a grant is released,
its memory serves as hot pages. Failed allocations are recorded as shortfalls, so that lent pages can be reclaimed.
"""

import collections
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from ..common.arithmetic import ceil_div
from ..common.errors import PdserveError

MANY = 256
"""So many pages are searched for in the whole pool, at C's speed: popping those of a long prompt takes 40 ms."""
PageT = TypeVar("PageT", bound=int)
"""KvPage or HotPage (index_spaces.py)."""


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that `tokens` tokens occupy."""
    return ceil_div(tokens, page_size)


def pages_holding(pages: Sequence[int], page_size: int, token_start: int, token_end: int) -> tuple[list[int], int]:
    """The pages of a sequence that hold these tokens, and the offset of the first token in the first of these pages."""
    first = token_start // page_size
    return list(pages[first : pages_for(token_end, page_size)]), token_start - first * page_size


def first_visible_page(position: int, window: int | None, page_size: int) -> int:
    """The first page that the first token of the page of `position` sees, if all layers have a sliding `window`; 0
    without a window. Later tokens see no earlier page.

    So pages are freed only when a sequence enters a new page, and the full pages of a sequence are always a prefix that
    can be continued.
    """
    return 0 if window is None else max(0, position - position % page_size - window + 1) // page_size


def most_visible_pages(window: int | None, page_size: int) -> float:
    """The most pages from the `first_visible_page` of a token to its own; inf without a window."""
    return math.inf if window is None else pages_for(window - 1, page_size) + 1


class PageLeakError(PdserveError):
    """`check_integrity()` found inconsistent page accounting: a bug."""


@dataclass(slots=True, eq=False, repr=False)
class PageGrant(Generic[PageT]):
    """The pages of one owner, in sequence order, and how many more it may take.

    Whoever may touch the pages holds the grant: its owner, and each copy that reads or writes them. The pages are free
    when every user has released it.

    It does not hold its first `freed` pages. No token sees them through the sliding window any more; their ids are
    placeholders that keep the index of the other pages.
    """

    owner: str
    pages: list[PageT]
    reserved: int
    freed: int = 0
    users: int = 1

    def __repr__(self) -> str:
        return f"PageGrant({self.owner!r}, {len(self.held)} pages, {self.reserved} reserved)"

    @property
    def held(self) -> list[PageT]:
        """The pages without the freed ones."""
        return self.pages[self.freed :] if self.freed else self.pages


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


class PageAllocator(Generic[PageT]):
    """Hands out the pages [first, first + num_pages). Not thread-safe: owned by the leader's scheduling thread."""

    def __init__(self, num_pages: int, first: int = 0) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self.on_evict: Callable[[PageT], None] | None = None
        """Called with each idle page that is evicted."""
        self.chances = 0
        """Counts events after which a refused grant may succeed: pages released, or kept, which can be shared."""
        self._range = range(first, first + num_pages)
        self._free = FreePages[PageT](self._range)
        self._holders = [0] * (first + num_pages)
        self._kept: set[PageT] = set()
        self._idle: collections.OrderedDict[PageT, None] = collections.OrderedDict()
        self._reserved = 0
        self._grants: set[PageGrant[PageT]] = set()
        self._unit_pages = 0
        self._loans: set[PageGrant[PageT]] = set()
        self._shortfalls: list[int] = []

    @property
    def available(self) -> int:
        """Pages that a new grant may hold or reserve."""
        return len(self._free) + len(self._idle) - self._reserved

    @property
    def held(self) -> int:
        """Pages that grants hold, without lent pages."""
        return self.num_pages - len(self._free) - len(self._idle) - self.lent

    @property
    def lent(self) -> int:
        """Pages that are lent as hot pages."""
        return sum(len(loan.pages) for loan in self._loans)

    def grant(
        self, owner: str, pages: int, reserve: int = 0, shared: Sequence[PageT] = (), freed: int = 0
    ) -> PageGrant[PageT] | None:
        """A grant of `freed` placeholders, the `shared` pages and `pages` new ones, in this order, with `reserve` more
        pages reserved. Returns None, and changes nothing, if there are not enough.

        New pages are ascending, and adjacent if the pool allows it: adjacent pages are transferred as one write.
        """
        if not self.can_grant(pages + reserve, shared):
            return None
        (grant,) = self.grant_each({owner: reserve}, pages, shared, freed)
        return grant

    def grant_each(
        self, owners: Mapping[str, int], pages: int, shared: Sequence[PageT], freed: int = 0
    ) -> list[PageGrant[PageT]]:
        """A grant as above for each owner, with its reservation; there must be enough. The shared pages are counted in
        one pass: one for each of 16 samples of a million tokens takes 0.1 s.
        """
        holders = self._holders
        for page in shared:
            if not holders[page]:
                assert page in self._idle, f"page {page} is free: it cannot be shared"
                del self._idle[page]
            holders[page] += len(owners)
        grants: list[PageGrant[PageT]] = []
        for owner, reserve in owners.items():
            held = [*shared, *self._take(pages)]
            grants.append(PageGrant(owner, [*held[:1] * freed, *held] if freed else held, reserve, freed=freed))
            self._reserved += reserve
        self._grants.update(grants)
        return grants

    def can_grant(self, pages: int, shared: Sequence[PageT] = ()) -> bool:
        """Whether `pages` pages can be held or reserved in addition to `shared`, some of which may be idle."""
        lacking = pages + self.idle_among(shared) - self.available
        if lacking > 0:
            self._note_shortfall(lacking)
        return lacking <= 0

    def idle_among(self, pages: Sequence[PageT]) -> int:
        """How many of these cached pages have no holder."""
        return sum(1 for page in pages if not self._holders[page])

    def grow(self, grant: PageGrant[PageT]) -> bool:
        """Add one page to `grant`, from its reservation or, if that is used up, from what is available."""
        assert grant in self._grants, f"grow of a released grant: {grant}"
        if grant.reserved:
            grant.reserved -= 1
            self._reserved -= 1
        elif self.available < 1:
            self._note_shortfall(1)
            return False
        grant.pages.extend(self._take(1))
        return True

    def hold(self, grant: PageGrant[PageT]) -> None:
        """Another user of these pages; it calls `release` when it has stopped."""
        assert grant in self._grants, f"hold of a released grant: {grant}"
        grant.users += 1

    def release(self, grant: PageGrant[PageT]) -> None:
        """One user has stopped, with its local and remote writers. The last one releases all pages."""
        assert grant in self._grants, f"second release of {grant}"
        grant.users -= 1
        if grant.users:
            return
        self._grants.remove(grant)
        self._reserved -= grant.reserved
        grant.reserved = 0
        self._loans.discard(grant)
        # last page first: eviction then takes a page before the earlier pages of its prefix
        self._let_go(grant.held[::-1])
        grant.pages, grant.freed = [], 0

    def give_back(self, grant: PageGrant[PageT], count: int) -> None:
        """Release the last `count` pages of a grant."""
        assert grant in self._grants, f"give_back of a released grant: {grant}"
        self._let_go([grant.pages.pop() for _ in range(count)])

    def split(self, grant: PageGrant[PageT], end: int) -> PageGrant[PageT]:
        """Move the pages of a grant before page `end` that it holds to a new grant; they are `freed` in the old one."""
        assert grant in self._grants, f"split of a released grant: {grant}"
        assert grant.users == 1, f"split of {grant}, which has {grant.users} users"
        part = PageGrant(f"{grant.owner}, behind its window", grant.pages[grant.freed : end], 0)
        grant.freed = max(grant.freed, end)
        self._grants.add(part)
        return part

    def reuse_first(self, grant: PageGrant[PageT]) -> bool:
        """Make the first held page of a grant its last one, unless it is shared or cached. The caller guarantees that
        the owner accesses its pages in order, so that a later write cannot destroy rows that are still read.
        """
        page = grant.pages[grant.freed]
        if self._holders[page] > 1 or page in self._kept:
            return False
        grant.freed += 1
        grant.pages.append(page)
        return True

    def divide(self, unit_pages: int) -> None:
        """Allow lending in units of `unit_pages` pages. No page may be granted yet."""
        assert not self._grants, "a pool in use cannot be divided"
        self._unit_pages = unit_pages
        self._free.divide(unit_pages)

    def lendable(self, keep: int) -> int:
        """Units that can be lent so that `keep` free pages remain in addition to the reserved ones.

        Idle pages do not count: a cached prefix is worth more than a lent unit.
        """
        if not self._unit_pages:
            return 0
        return max(0, min(self._free.whole_units, (len(self._free) - self._reserved - keep) // self._unit_pages))

    def lend(self, owner: str, units: int) -> PageGrant[PageT]:
        """Lend `units` of the `lendable` units. The grant is released like any other."""
        grant = PageGrant(owner, self._free.pop_units(units), 0)
        for page in grant.pages:
            self._holders[page] = 1
        self._grants.add(grant)
        self._loans.add(grant)
        return grant

    def take_shortfalls(self) -> list[int]:
        """Missing pages of each refused allocation since the last call. Always empty if the pool is not divided."""
        taken, self._shortfalls = self._shortfalls, []
        return taken

    def keep(self, page: PageT) -> None:
        """Mark a held page as cached: it becomes idle, not free, when its last holder releases it."""
        assert self._holders[page], f"page {page} has no holder"
        self._kept.add(page)
        self.chances += 1

    def forget(self, page: PageT) -> None:
        """Undo `keep`."""
        self._kept.remove(page)
        if page in self._idle:
            del self._idle[page]
            self._free.add(page)

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise PageLeakError unless every page is free, idle or held as often as grants list it. With `idle`, no page
        may be held.
        """
        held = collections.Counter(itertools.chain.from_iterable(grant.held for grant in self._grants))
        everything = sorted([*self._free, *self._idle, *held])
        if everything != list(self._range):
            found = f"{len(self._free)} free + {len(self._idle)} idle + {len(held)} held"
            raise PageLeakError(f"{found} pages are not the {self.num_pages} of the pool")
        if self._holders[self._range.start :] != [held.get(page, 0) for page in everything]:
            raise PageLeakError(f"the counts of holders differ from the grants: {self._names()}")
        if self._reserved != sum(grant.reserved for grant in self._grants):
            raise PageLeakError(
                f"{self._reserved} pages are reserved, but the grants hold another number: {self._names()}"
            )
        if self.available < 0:
            raise PageLeakError(f"{self._reserved} pages are reserved, more than are free or idle")
        if idle and self._grants:
            raise PageLeakError(f"idle, but pages are held by {self._names()}")

    def _let_go(self, pages: Sequence[PageT]) -> None:
        holders = self._holders
        for page in pages:
            holders[page] = left = holders[page] - 1
            if left:
                continue
            if page in self._kept:
                self._idle[page] = None
            else:
                self._free.add(page)
        self.chances += len(pages)

    def _take(self, count: int) -> list[PageT]:
        while len(self._free) < count:
            page, _ = self._idle.popitem(last=False)
            self._kept.remove(page)
            self._free.add(page)
            if self.on_evict is not None:
                self.on_evict(page)
        taken = self._free.take(count)
        for page in taken:
            self._holders[page] = 1
        return taken

    def _note_shortfall(self, pages: int) -> None:
        if self._unit_pages:
            self._shortfalls.append(pages)

    def _names(self) -> str:
        return ", ".join(sorted(grant.owner for grant in self._grants))
