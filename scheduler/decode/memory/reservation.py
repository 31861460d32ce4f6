"""Reserves pages for a prompt and its samples: all of them or none."""

import dataclasses

from ....memory.index_spaces import KvPage
from ....memory.pages import PageAllocator, PageGrant, first_visible_page, most_visible_pages, pages_for
from ....memory.prefix_cache import PrefixCache
from ..requests.limits import DecodeLimits
from ..requests.request import Prompt, Refusal


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """The pages of the prompt, which prefill or this server will write, and a grant for each waiting member."""

    prompt: PageGrant[KvPage]
    members: list[PageGrant[KvPage]]
    prefix_tokens: int
    """Tokens at the start of the prompt whose KV prefill does not have to send: it is in cached pages, it is copied
    from a cached page, or no decode step will see it.
    """
    unseen_tokens: int = 0
    """How many of the `prefix_tokens` are not cached: they are behind the sliding window of the first step."""
    copied: PageGrant[KvPage] | None = None
    """Holds the cached page whose first tokens are copied to the first new page of the prompt."""


def pages_needed(prompt_tokens: int, samples: int, kv_tokens: int, page_size: int, window: int | None = None) -> int:
    """The most pages that `samples` sequences of up to `kv_tokens` tokens hold at any time. They share the full pages
    of their prompt, and hold no pages behind the sliding `window`.
    """
    full = prompt_tokens // page_size
    shared = full - first_unfreed_page(prompt_tokens, window, page_size)
    own = pages_for(kv_tokens, page_size) - full
    return int(min(shared + samples * own, samples * most_visible_pages(window, page_size)))


def first_unfreed_page(prompt_tokens: int, window: int | None, page_size: int) -> int:
    """The first page of a prompt that its requests still hold at their first step. This is the first page that the step
    sees, but at most the last page of the prompt.
    """
    return min(first_visible_page(prompt_tokens, window, page_size), pages_for(prompt_tokens, page_size) - 1)


def fits_to_compute(prompt: Prompt, num_pages: int, limits: DecodeLimits) -> bool:
    """Whether a pool of `num_pages` pages can hold what `reserve` takes for a prompt that is computed here: also its
    pages behind the window, beside those of its samples. Without a window, prompts for which it cannot are refused.
    """
    page_size, window = limits.page_size, limits.window
    if window is None:
        return True
    count, full = pages_for(prompt.tokens, page_size), prompt.tokens // page_size
    visible = first_unfreed_page(prompt.tokens, window, page_size)
    most_tokens = [min(request.most_kv_tokens, prompt.tokens + limits.growth_tokens) for request in prompt.waiting]
    growth = sum(growth_pages(count - visible, visible, tokens, page_size, window) for tokens in most_tokens)
    return count + (count - full) * (len(most_tokens) - 1) + growth <= num_pages


def growth_pages(held: int, first: int, kv_tokens: int, page_size: int, window: int | None) -> int:
    """The most pages that a sequence takes in addition to `held` pages, from page `first` on, until it has `kv_tokens`
    tokens.
    """
    most = min(pages_for(kv_tokens, page_size) - first, most_visible_pages(window, page_size))
    return int(max(0, most - held))


def reserve(
    prompt: Prompt,
    pages: PageAllocator[KvPage],
    cache: PrefixCache,
    limits: DecodeLimits,
    *,
    most_cached: int,
    local: bool = False,
) -> Reservation | None:
    """Reserve pages for the prompt, and for each waiting member its own last page and some growth; None if there are
    not enough. At most `most_cached` tokens are taken from the cache.

    With `local`, this server computes the prompt, and needs pages from the first one that is not cached. Without it,
    prefill computes the prompt: then the cached prefix may end inside a page, and no pages are reserved behind the
    sliding window of the first step.

    The first member uses the last page of the prompt itself; the others get a copy of it.

    The lookup in the cache takes milliseconds for a long prompt. So after a failed reservation (`Prompt.refusal`), it
    is repeated only if it may succeed.
    """
    page_size, window = limits.page_size, limits.window
    samples, last = len(prompt.waiting), prompt.refusal
    if last is not None and last[1:] == (samples, pages.chances) and not pages.can_grant(last.pages):
        return None
    prefix = cache.match(prompt.token_ids, most_cached)
    count, full = pages_for(prompt.tokens, page_size), prompt.tokens // page_size
    visible = first_unfreed_page(prompt.tokens, window, page_size)
    first = cache.first_needed(len(prefix)) if local else visible
    # pages of the prompt: [0, first) are placeholders, [first, begin) are cached, [begin, count) are new
    begin, cached = max(len(prefix), first), prefix[first:]
    most_tokens = [min(request.most_kv_tokens, prompt.tokens + limits.growth_tokens) for request in prompt.waiting]
    growth = [growth_pages(count - visible, visible, tokens, page_size, window) for tokens in most_tokens]
    copies = (count - full) * (samples - 1)
    # count everything before taking anything: a grant evicts cached pages, which would be lost if another grant fails
    wanted = count - begin + copies + sum(growth)
    if not pages.can_grant(wanted, cached):
        prompt.refusal = Refusal(wanted + pages.idle_among(cached), samples, pages.chances)
        return None
    within = not local and (bool(cached) or not first)
    partial = cache.match_within(prompt.token_ids, prefix, most_cached) if within else None
    copied: PageGrant[KvPage] | None = None
    if partial is not None and wanted + pages.idle_among([*cached, partial.page]) <= pages.available:
        copied = _granted(pages.grant(f"copy for prompt {prompt.prompt_id}", 0, shared=[partial.page]))
    grant = _granted(pages.grant(f"prompt {prompt.prompt_id}", count - begin, shared=cached, freed=first))
    members: list[PageGrant[KvPage]] = []
    for request, more in zip(prompt.waiting, growth, strict=True):
        shared = grant.pages[first:] if not members else grant.pages[first:full]
        members.append(_granted(pages.grant(request.rid, count - first - len(shared), more, shared, first)))
    partly = partial.tokens if partial is not None and copied is not None else 0
    unseen = first * page_size if not cached else 0
    return Reservation(grant, members, begin * page_size + partly, unseen, copied)


def _granted(grant: PageGrant[KvPage] | None) -> PageGrant[KvPage]:
    assert grant is not None, "a grant failed after can_grant()"
    return grant
