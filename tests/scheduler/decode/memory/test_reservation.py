"""Reservations for a prompt and its samples: all pages or none, without useless evictions from the prefix cache."""

from unittest.mock import Mock

import pytest

from pdserve.common.sampling import SamplingParams
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.memory.prefix_cache import PrefixCache
from pdserve.scheduler.decode.memory.request_memory import Reservation, pages_needed, reserve
from pdserve.scheduler.decode.requests.request import Prompt, Request
from tests.scheduler.simulation.timed_simulator import decode_limits

PAGE = 4
CACHED = tuple(range(100, 108))  # two pages, of another prompt


def ask(
    pages: PageAllocator[KvPage], cache: PrefixCache, tokens: tuple[int, ...], samples: int, new_tokens: int
) -> Reservation | None:
    prompt = Prompt(1, tokens, now=0)
    sampling = SamplingParams(max_new_tokens=new_tokens)
    prompt.members = [Request(f"r{at}", prompt, sampling, deadline=9, now=0, sample=at) for at in range(samples)]
    return reserve(
        prompt, pages, cache, decode_limits(page_size=PAGE, growth_tokens=new_tokens), most_cached=prompt.tokens
    )


@pytest.mark.parametrize(("tokens", "samples", "new_tokens"), [(10, 1, 1), (10, 3, 1), (10, 3, 9), (8, 2, 6)])
def test_failed_reservation_takes_nothing_and_evicts_nothing(tokens: int, samples: int, new_tokens: int) -> None:
    """With one page too few nothing changes; with enough pages all are taken, including cached ones."""
    needed = pages_needed(tokens, samples, tokens + new_tokens - 1, PAGE)
    for num_pages in (needed - 1, needed):
        pages = PageAllocator[KvPage](max(num_pages, 2))
        cache = PrefixCache(pages, PAGE)
        before = pages.grant("before", 2)
        assert before is not None
        cache.insert(CACHED, before.pages)
        pages.release(before)
        found = ask(pages, cache, tuple(range(tokens)), samples, new_tokens)
        if num_pages < needed:
            assert found is None
            assert (len(pages._idle), pages.available, len(cache)) == (2, num_pages, 2)
        else:
            assert found is not None
            assert pages.available == 0
            assert len(found.members) == samples
            for grant in [*found.members, found.prompt]:
                pages.release(grant)
        pages.check_integrity(idle=True)


def test_idle_cached_prefix_counts_as_taken() -> None:
    pages = PageAllocator[KvPage](3)
    cache = PrefixCache(pages, PAGE)
    before = pages.grant("before", 2)
    assert before is not None
    cache.insert(CACHED, before.pages)
    pages.release(before)
    assert ask(pages, cache, (*CACHED, 1, 2), samples=2, new_tokens=1) is None  # two shared, one each
    assert (len(pages._idle), pages.available) == (2, 3)
    found = ask(pages, cache, (*CACHED, 1, 2), samples=1, new_tokens=1)
    assert found is not None
    assert (found.prefix_tokens, pages.available) == (8, 0)


def test_refused_prompt_is_matched_again_only_after_pages_became_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """After pages were released, after pages were cached that it can share, or with fewer samples."""
    pages = PageAllocator[KvPage](6)
    cache = PrefixCache(pages, PAGE)
    prompt = Prompt(1, (*CACHED, 1, 2), now=0)
    sampling = SamplingParams(max_new_tokens=1)
    prompt.members = [Request(f"r{at}", prompt, sampling, deadline=9, now=0, sample=at) for at in range(2)]
    search = Mock(wraps=cache.match)
    monkeypatch.setattr(cache, "match", search)

    def tries() -> tuple[bool, int]:
        search.reset_mock()
        found = reserve(prompt, pages, cache, decode_limits(page_size=PAGE, growth_tokens=1), most_cached=prompt.tokens)
        if found is not None:
            for grant in [*found.members, found.prompt]:
                pages.release(grant)
        return found is not None, search.call_count

    other, holder = pages.grant("other", 2), pages.grant("holder", 3)
    assert other is not None
    assert holder is not None
    assert [tries(), tries()] == [(False, 1), (False, 0)]  # four are needed, one is free
    cache.insert(CACHED, holder.pages)
    assert [tries(), tries()] == [(False, 1), (False, 0)]  # two are needed
    prompt.members.pop()
    assert tries() == (True, 1)
    prompt.members.append(Request("r1", prompt, sampling, deadline=9, now=0, sample=1))
    assert tries() == (False, 1)
    pages.release(other)
    assert tries() == (True, 1)


def cached(pages: PageAllocator[KvPage], tokens: tuple[int, ...]) -> PrefixCache:
    """A cache with the full pages of one ended sequence."""
    cache = PrefixCache(pages, PAGE)
    grant = pages.grant("earlier", len(tokens) // PAGE)
    assert grant is not None
    cache.insert(tokens, grant.pages)
    pages.release(grant)
    return cache


@pytest.mark.parametrize(
    ("shared", "prefix"),
    [(8, 8), (7, 7), (6, 6), (5, 5), (4, 4), (1, 1), (0, 0)],
)
def test_prefix_may_end_inside_a_page(shared: int, prefix: int) -> None:
    """The page that holds its last tokens is copied: it is held until then, and the prompt has a page of its own."""
    pages = PageAllocator[KvPage](8)
    cache = cached(pages, CACHED)
    prompt = Prompt(1, (*CACHED[:shared], *range(9, 0, -1)), now=0)
    prompt.members = [Request("r", prompt, SamplingParams(max_new_tokens=2), deadline=9, now=0)]
    made = reserve(prompt, pages, cache, decode_limits(page_size=PAGE, growth_tokens=2), most_cached=prompt.tokens)
    assert made is not None
    assert made.prefix_tokens == prefix
    assert (made.copied is not None) == bool(prefix % PAGE)
    if made.copied is not None:
        (source,) = made.copied.pages
        assert source not in made.prompt.pages
        assert source == cache.match(CACHED, 8)[shared // PAGE]
    pages.check_integrity()


def test_partial_prefix_page_is_not_copied_if_the_prompt_needs_its_memory() -> None:
    pages = PageAllocator[KvPage](4)
    cache = cached(pages, CACHED)
    prompt = Prompt(1, (*CACHED[:6], *range(9, 0, -1)), now=0)  # four pages, one of them shared
    prompt.members = [Request("r", prompt, SamplingParams(max_new_tokens=1), deadline=9, now=0)]
    made = reserve(prompt, pages, cache, decode_limits(page_size=PAGE, growth_tokens=1), most_cached=prompt.tokens)
    assert made is not None
    assert (made.prefix_tokens, made.copied) == (PAGE, None)


def test_longest_beginning_of_a_cached_page_is_taken_and_short_ones_are_not() -> None:
    pages = PageAllocator[KvPage](8)
    cache = PrefixCache(pages, 8)
    grant = pages.grant("r", 3)
    assert grant is not None
    for page, tokens in zip(grant.pages, ((1, 2, 3, 0, 0, 0, 0, 0), (1, 2, 3, 4, 5, 0, 0, 0), (1, 9)), strict=True):
        cache.insert((*tokens, *[0] * (8 - len(tokens))), [page])
    found = cache.match_within(tuple(range(1, 20)), [], 19)
    assert found == (grant.pages[1], 5)
    assert cache.match_within(tuple(range(1, 20)), [], 4) == (grant.pages[1], 4)
    assert cache.match_within((1, 5, 5), [], 3) is None, "one token of eight is not worth a copy"
    assert cache.match_within((7, 7, 7), [], 3) is None


def test_prompt_that_got_pages_does_not_count_as_waiting_for_them_when_it_is_queued_again() -> None:
    pages = PageAllocator[KvPage](2)
    cache, limits = PrefixCache(pages, PAGE), decode_limits(page_size=PAGE, growth_tokens=0)
    before = pages.grant("before", 1)
    assert before is not None
    prompt = Prompt(1, tuple(range(7)), now=0)
    prompt.members = [Request("r", prompt, SamplingParams(max_new_tokens=1), deadline=9, now=0)]
    assert reserve(prompt, pages, cache, limits, most_cached=7) is None
    assert prompt.refusal is not None
    pages.release(before)
    assert reserve(prompt, pages, cache, limits, most_cached=7) is not None
    assert prompt.refusal is None
