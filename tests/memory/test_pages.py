"""The page allocator and the prefix cache against plain models."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator, PageGrant, PageLeakError, pages_holding
from pdserve.memory.prefix_cache import InsertedPrefix, PrefixCache

PAGE_SIZE = 2


@pytest.fixture(autouse=True)
def _three_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.memory.pages.MANY", 3)


class PoolMachine(RuleBasedStateMachine):
    """Requests with few different tokens start, share cached pages, grow and finish.

    The model: `content` records the tokens that each held page was filled with. Pages that the cache returns must have
    exactly that content, and held pages must not be granted again. Units of three pages are lent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.size = 13
        self.allocator = PageAllocator[KvPage](self.size)
        self.allocator.divide(3)
        self.cache = PrefixCache(self.allocator, PAGE_SIZE)
        self.requests: dict[PageGrant[KvPage], list[int]] = {}
        self.inserted: dict[PageGrant[KvPage], InsertedPrefix] = {}
        self.loans: list[PageGrant[KvPage]] = []
        self.content: dict[int, tuple[int, ...]] = {}
        """The whole prefix up to the end of each page, by page."""

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), reserve=st.integers(0, 4))
    def start(self, tokens: list[int], reserve: int) -> None:
        shared = self.cache.match(tokens, len(tokens) - 1)
        for index, page in enumerate(shared):
            assert self.content[page] == tuple(tokens[: (index + 1) * PAGE_SIZE])
        wanted = -(-len(tokens) // PAGE_SIZE) - len(shared)
        revived = sum(1 for page in shared if all(page not in grant.pages for grant in self.requests))
        fits = wanted + reserve + revived <= self.allocator.available
        lacking = wanted + reserve + revived - self.allocator.available
        grant = self.allocator.grant("x", wanted, reserve, shared)
        assert (grant is not None) == fits
        assert self.allocator.take_shortfalls() == ([] if fits else [lacking])
        if grant is None:
            return
        assert grant.pages[: len(shared)] == shared
        for index, page in list(enumerate(grant.pages))[len(shared) :]:
            others = [*self.requests, *self.loans]
            assert all(page not in other.pages for other in others), "granted a page that is in use"
            self.content[page] = tuple(tokens[: (index + 1) * PAGE_SIZE])
        self.requests[grant] = tokens
        self.inserted[grant] = self.cache.after(shared)
        for end in (len(tokens) // 2, len(tokens)):
            self.cache.insert(tokens, grant.pages, self.inserted[grant], end=end)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), samples=st.integers(1, 3), reserve=st.integers(0, 2))
    def sample(self, data: st.DataObject, samples: int, reserve: int) -> None:
        """More sequences with the full pages of a request; each has a last page of its own."""
        source = data.draw(st.sampled_from(list(self.requests)))
        tokens = self.requests[source]
        full = len(tokens) // PAGE_SIZE
        own = -(-len(tokens) // PAGE_SIZE) - full
        if samples * (own + reserve) > self.allocator.available:
            return
        names = [f"sample {number}" for number in range(samples)]
        grants = self.allocator.grant_each(dict.fromkeys(names, reserve), own, source.pages[:full])
        assert [grant.owner for grant in grants] == names
        for grant in grants:
            assert (grant.pages[:full], grant.reserved) == (source.pages[:full], reserve)
            for page in grant.pages[full:]:
                assert all(page not in other.pages for other in [*self.requests, *self.loans]), "a page that is in use"
                self.content[page] = tuple(tokens)
            self.requests[grant], self.inserted[grant] = [*tokens], InsertedPrefix()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token=st.integers(0, 1))
    def generate(self, data: st.DataObject, token: int) -> None:
        grant = data.draw(st.sampled_from(list(self.requests)))
        tokens = self.requests[grant]
        if len(tokens) == len(grant.pages) * PAGE_SIZE:
            reserved, available = grant.reserved, self.allocator.available
            grown = self.allocator.grow(grant)
            assert self.allocator.take_shortfalls() == ([] if grown else [1])
            assert grown == (reserved > 0 or available > 0)
            assert self.allocator.available == available - (grown and not reserved), (
                "a reserved page is not counted twice"
            )
            if not grown:
                return
        tokens.append(token)
        self.content[grant.pages[-1]] = tuple(tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), remember=st.booleans())
    def finish(self, data: st.DataObject, remember: bool) -> None:
        grant = data.draw(st.sampled_from(list(self.requests)))
        tokens = self.requests.pop(grant)
        inserted = self.inserted.pop(grant)
        if remember:
            self.cache.insert(tokens, grant.pages, inserted)
        self.allocator.release(grant)

    @rule(units=st.integers(1, 3), keep=st.integers(0, 3))
    def lend(self, units: int, keep: int) -> None:
        taken = {page for grant in [*self.requests, *self.loans] for page in grant.pages}
        free = {page for page in range(self.size) if page not in taken} - set(self.allocator._idle)
        whole = [unit for unit in range(self.size // 3) if {*range(3 * unit, 3 * unit + 3)} <= free]
        reserved = sum(grant.reserved for grant in self.requests)
        most = max(0, min(len(whole), (len(free) - reserved - keep) // 3))
        assert self.allocator.lendable(keep) == most
        if units <= most:
            loan = self.allocator.lend("y", units)
            assert loan.pages == [page for unit in whole[-units:] for page in range(3 * unit, 3 * unit + 3)]
            self.loans.append(loan)

    @precondition(lambda self: self.loans)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        loan = data.draw(st.sampled_from(self.loans))
        self.loans.remove(loan)
        self.allocator.release(loan)

    @rule()
    def flush(self) -> None:
        self.cache.flush()
        assert len(self.cache) == 0
        assert len(self.allocator._idle) == 0

    @invariant()
    def counts_of_pages_are_correct(self) -> None:
        self.allocator.check_integrity(idle=not self.requests and not self.loans)
        held = {page for grant in self.requests for page in grant.pages}
        lent = {page for loan in self.loans for page in loan.pages}
        reserved = sum(grant.reserved for grant in self.requests)
        assert not held & lent
        assert self.allocator.held == len(held)
        assert self.allocator.lent == len(lent)
        assert self.allocator.available == self.size - len(held) - len(lent) - reserved

    def teardown(self) -> None:
        for grant in [*self.requests, *self.loans]:
            self.allocator.release(grant)
        everything = self.allocator.grant("all", self.size)
        assert everything is not None, "cached pages were not evicted for a grant"
        assert len(self.cache) == 0


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)


def test_new_pool_grants_adjacent_pages() -> None:
    grant = PageAllocator[KvPage](8).grant("a", 3)
    assert grant is not None
    assert grant.pages == [0, 1, 2]


def test_allocator_grants_the_lowest_pages_first() -> None:
    pages = PageAllocator[KvPage](4, first=7)
    grants = [pages.grant("a", 2), pages.grant("b", 2)]
    first, second = grants
    assert first is not None
    assert second is not None
    assert (first.pages, second.pages) == ([7, 8], [9, 10])
    pages.release(second)
    pages.release(first)
    again = pages.grant("c", 3)
    assert again is not None
    assert again.pages == [7, 8, 9]
    pages.check_integrity()


def test_undivided_pool_lends_nothing_and_records_no_shortfall() -> None:
    pages = PageAllocator[KvPage](4)
    assert pages.lendable(0) == 0
    assert pages.grant("a", 5) is None
    assert pages.take_shortfalls() == []


def test_lending_and_releasing_units_does_not_grow_the_free_heap() -> None:
    """Pages that `pop_units` takes stay in the heap of free pages, once."""
    pages = PageAllocator[KvPage](12)
    pages.divide(4)
    used_before = pages.grant("all", 12)
    assert used_before is not None
    pages.release(used_before)
    for _ in range(10):
        pages.release(pages.lend("a", 2))
    assert len(pages._free._queue) == 12
    everything = pages.grant("all", 12)
    assert everything is not None
    assert everything.pages == list(range(12))


def test_units_of_pages_that_were_never_used_are_lent_and_granted_later() -> None:
    pages = PageAllocator[KvPage](12)
    pages.divide(4)
    lent = pages.lend("a", 2)
    assert lent.pages == list(range(4, 12))
    first = pages.grant("b", 4)
    assert first is not None
    assert (first.pages, pages.available) == ([0, 1, 2, 3], 0)
    pages.release(lent)
    pages.check_integrity()
    rest = pages.grant("c", 8)
    assert rest is not None
    assert rest.pages == list(range(4, 12))
    pages.check_integrity()


def test_least_recently_used_prefix_is_evicted_first() -> None:
    pages = PageAllocator[KvPage](4)
    cache = PrefixCache(pages, 1)
    for tokens in ([1, 2], [3, 4]):
        grant = pages.grant("a", 2)
        assert grant is not None
        cache.insert(tokens, grant.pages)
        pages.release(grant)
    again = pages.grant("b", 0, shared=cache.match([1, 2], 2))
    assert again is not None
    pages.release(again)
    assert pages.grant("c", 1) is not None
    assert len(cache.match([1, 2], 2)) == 2
    assert len(cache.match([3, 4], 2)) == 1, "the older prefix lost its last page only"


def test_pages_behind_a_page_that_is_cached_twice_are_not_added() -> None:
    pages = PageAllocator[KvPage](4)
    cache = PrefixCache(pages, 1)
    first, second = pages.grant("a", 1), pages.grant("b", 2)
    assert first is not None
    assert second is not None
    cache.insert([1], first.pages)
    cache.insert([1, 2], second.pages)
    assert cache.match([1, 2], 2) == first.pages, "its parent could be evicted while it is in use"


def test_sequence_is_cached_from_its_beginning_after_a_flush() -> None:
    pages = PageAllocator[KvPage](3)
    cache, inserted = PrefixCache(pages, 1), InsertedPrefix()
    grant = pages.grant("a", 3)
    assert grant is not None
    cache.insert([1, 2, 3], grant.pages, inserted, end=2)
    assert cache.flush() == 2
    cache.insert([1, 2, 3], grant.pages, inserted)
    assert cache.match([1, 2, 3], 3) == grant.pages


def test_disabled_cache_keeps_nothing() -> None:
    pages = PageAllocator[KvPage](4)
    cache = PrefixCache(pages, 1, enabled=False)
    grant = pages.grant("a", 2)
    assert grant is not None
    cache.insert([1, 2], grant.pages)
    pages.release(grant)
    assert cache.match([1, 2], 2) == []
    assert len(pages._idle) == 0


def test_leak_error_names_the_owner() -> None:
    pages = PageAllocator[KvPage](4)
    assert pages.grant("request-7", 2) is not None
    with pytest.raises(PageLeakError, match="request-7"):
        pages.check_integrity(idle=True)


def test_lost_page_is_detected() -> None:
    pages = PageAllocator[KvPage](4)
    grant = pages.grant("a", 2)
    assert grant is not None
    grant.pages.pop()
    with pytest.raises(PageLeakError, match="2 free \\+ 0 idle \\+ 1 held"):
        pages.check_integrity()


@pytest.mark.parametrize("page", [4, 7])
def test_wrong_count_of_holders_is_detected(page: int) -> None:
    pages = PageAllocator[KvPage](4, first=4)
    assert pages.grant("a", 2) is not None
    pages.check_integrity()
    pages._holders[page] += 1
    with pytest.raises(PageLeakError, match="counts of holders differ"):
        pages.check_integrity()


def test_second_release_is_refused() -> None:
    pages = PageAllocator[KvPage](4)
    grant = pages.grant("a", 2)
    assert grant is not None
    pages.release(grant)
    with pytest.raises(AssertionError, match="second release"):
        pages.release(grant)


def test_pages_are_free_when_every_user_has_released_them() -> None:
    pages = PageAllocator[KvPage](4)
    grant = pages.grant("a", 2, reserve=1)
    assert grant is not None
    pages.hold(grant)
    pages.release(grant)
    assert (pages.held, pages.available) == (2, 1), "a copy still reads them"
    pages.release(grant)
    assert (pages.held, pages.available) == (0, 4)
    with pytest.raises(AssertionError, match="released grant"):
        pages.hold(grant)


def test_pages_holding_finds_the_pages_of_a_token_range() -> None:
    pages = [7, 3, 9, 4]
    assert pages_holding(pages, 16, 0, 16) == ([7], 0)
    assert pages_holding(pages, 16, 15, 33) == ([7, 3, 9], 15)
    assert pages_holding(pages, 16, 48, 50) == ([4], 0)
