"""Reservations for a prompt and its samples: all pages or none, without useless evictions from the prefix cache."""

from unittest.mock import Mock

import pytest

from pdserve.configs.sampling import SamplingParams
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.memory.prefix_cache import PrefixCache
from pdserve.scheduler.decode.requests.request import Prompt, Request
from pdserve.scheduler.decode.requests.reservation import Reservation, pages_needed, reserve

PAGE = 4
CACHED = tuple(range(100, 108))  # two pages, of another prompt


def ask(
    pages: PageAllocator[KvPage], cache: PrefixCache, tokens: tuple[int, ...], samples: int, new_tokens: int
) -> Reservation | None:
    prompt = Prompt(1, tokens, now=0)
    sampling = SamplingParams(max_new_tokens=new_tokens)
    prompt.members = [Request(f"r{at}", prompt, sampling, deadline=9, now=0, sample=at) for at in range(samples)]
    return reserve(prompt, pages, cache, page_size=PAGE, growth_tokens=new_tokens, most_cached=prompt.tokens)


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
            assert (pages.idle, pages.available, len(cache)) == (2, num_pages, 2)
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
    assert (pages.idle, pages.available) == (2, 3)
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
        found = reserve(prompt, pages, cache, page_size=PAGE, growth_tokens=1, most_cached=prompt.tokens)
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
