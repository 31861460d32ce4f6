"""Models with a sliding window in all layers: pages before it are freed, and prefixes are cached without them."""

import pytest

from pdserve.memory.index_spaces import KvPage
from pdserve.memory.page_hashes import ROOT, page_hashes
from pdserve.memory.pages import PageAllocator, PageGrant, first_visible_page, most_visible_pages, pages_for
from pdserve.memory.prefix_cache import InsertedPrefix, PrefixCache

PAGE, WINDOW = 4, 6
TOKENS = tuple(range(100, 124))  # six pages
HASHES = page_hashes(TOKENS, PAGE)


@pytest.mark.parametrize("page_size", [1, 3, 4, 8])
@pytest.mark.parametrize("window", [2, 3, 4, 5, 8, 9, 32])
def test_visible_pages_begin_with_the_first_key_that_the_page_of_the_token_sees(window: int, page_size: int) -> None:
    most = 0
    for position in range(100):
        first = first_visible_page(position, window, page_size)
        assert first == max(0, position // page_size * page_size - window + 1) // page_size
        assert first * page_size <= max(0, position - window + 1)
        most = max(most, pages_for(position + 1, page_size) - first)
    assert most == most_visible_pages(window, page_size)


def test_all_pages_are_visible_without_a_window() -> None:
    assert first_visible_page(10**6, None, PAGE) == 0
    assert most_visible_pages(None, PAGE) > 10**9


class Listener:
    """Records which pages are cached, by their index in TOKENS."""

    def __init__(self) -> None:
        self.cached: set[int] = set()

    def stored(self, parent: bytes, first: int, hashes: list[bytes], tokens: list[tuple[int, ...]]) -> None:
        numbers = [HASHES.index(page) for page in hashes]
        assert numbers == list(range(first, first + len(hashes)))
        assert parent == (HASHES[first - 1] if first else ROOT)
        assert tokens == [TOKENS[number * PAGE : (number + 1) * PAGE] for number in numbers]
        assert not self.cached.intersection(numbers), "a page was reported twice"
        self.cached.update(numbers)

    def removed(self, pages: list[bytes]) -> None:
        self.cached.difference_update(map(HASHES.index, pages))

    def cleared(self) -> None:
        self.cached.clear()


class Cached:
    """A pool and its prefix cache, with one sequence that holds six pages."""

    def __init__(self, num_pages: int = 6) -> None:
        self.allocator = PageAllocator[KvPage](num_pages)
        self.cache = PrefixCache(self.allocator, PAGE, window=WINDOW)
        self.listener = Listener()
        self.cache.listen(self.listener)
        self.inserted = InsertedPrefix()
        self.grant = self.take("sequence", 6)

    def take(self, owner: str, pages: int) -> PageGrant[KvPage]:
        grant = self.allocator.grant(owner, pages)
        assert grant is not None
        return grant

    def insert(self, end: int = len(TOKENS)) -> None:
        self.cache.insert(TOKENS, self.grant.pages, self.inserted, end=end, freed=self.grant.freed)

    def free(self, end: int) -> None:
        self.allocator.release(self.allocator.split(self.grant, end))
        self.allocator.check_integrity()

    def found(self, most_tokens: int = len(TOKENS), needed_from: int | None = None) -> int:
        """The number of tokens that match; the pages of the match that are needed are those of the sequence."""
        prefix = self.cache.match(TOKENS, most_tokens, needed_from)
        first = self.cache.first_needed(len(prefix), needed_from)
        assert prefix[first:] == self.grant.pages[first : len(prefix)]
        return len(prefix) * PAGE


def test_prefix_matches_while_the_pages_that_its_next_token_sees_are_cached() -> None:
    cached = Cached()
    cached.insert()
    cached.free(4)
    assert (cached.allocator.held, len(cached.allocator._idle), cached.found()) == (2, 4, 24)
    other = cached.take("other", 2)  # evicts the last two of the four freed pages
    assert len(cached.cache) == len(cached.listener.cached) == 4
    assert cached.found() == 24, "the token after six pages sees only the last two"
    more = cached.take("more", 2)
    assert cached.listener.cached == {4, 5}
    assert cached.found() == 24
    assert cached.found(most_tokens=20) == 0, "the token after five pages sees pages 3 and 4"
    assert cached.found(needed_from=0) == 0, "an earlier page has to be sent"
    for grant in (cached.grant, other, more):
        cached.allocator.release(grant)
    assert cached.found(most_tokens=20) == 0
    cached.take("all", 6)
    assert (len(cached.cache), cached.listener.cached, cached.cache._roots) == (0, set(), {})


def test_sequence_is_cached_without_its_freed_pages() -> None:
    cached = Cached()
    cached.free(4)
    cached.insert(end=12)
    assert (len(cached.cache), cached.cache._roots) == (0, {}), "only freed pages"
    cached.insert()
    assert cached.listener.cached == {4, 5}
    assert cached.found() == 24


def test_later_pages_of_a_sequence_are_cached_after_its_first_ones_were_evicted() -> None:
    cached = Cached(num_pages=7)
    cached.insert(end=8)
    cached.free(2)
    other = cached.take("other", 3)
    assert (len(cached.cache), cached.cache._roots) == (0, {})
    cached.insert()
    assert cached.listener.cached == {2, 3, 4, 5}
    assert cached.found() == 24
    cached.allocator.release(other)
    cached.allocator.release(cached.grant)
    cached.allocator.check_integrity(idle=True)


def test_page_is_cached_again_by_another_sequence() -> None:
    cached = Cached(num_pages=8)
    cached.insert()
    cached.free(4)
    other = cached.take("other", 6)
    assert cached.listener.cached == {4, 5}
    cached.cache.insert(TOKENS, other.pages, end=16)
    assert cached.listener.cached == {0, 1, 2, 3, 4, 5}
    assert len(cached.cache.match(TOKENS, 16)) == 4
    cached.allocator.release(other)
    cached.allocator.release(cached.grant)
    cached.allocator.check_integrity(idle=True)


def test_listener_added_later_gets_only_cached_pages() -> None:
    cached = Cached()
    cached.insert()
    cached.free(4)
    cached.take("other", 4)
    late = Listener()
    cached.cache.listen(late)
    assert late.cached == {4, 5}


def test_first_page_is_reused_only_if_it_is_neither_cached_nor_shared() -> None:
    pages = PageAllocator[KvPage](3)
    cache = PrefixCache(pages, PAGE, window=WINDOW)
    grant = pages.grant("a", 3)
    assert grant is not None
    first, second, third = grant.pages
    cache.insert(TOKENS[:4], grant.pages)
    assert not pages.reuse_first(grant), "it is cached"
    pages.release(pages.split(grant, 1))
    sharer = pages.grant("b", 0, shared=[second])
    assert sharer is not None
    assert not pages.reuse_first(grant), "it is shared"
    pages.release(sharer)
    assert pages.reuse_first(grant)
    assert (grant.pages, grant.held) == ([first, second, third, second], [third, second])
    pages.check_integrity()
    pages.release(grant)
    pages.check_integrity(idle=True)
