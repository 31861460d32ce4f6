"""Reserves pages for a prompt and its samples: all of them or none."""

import dataclasses

from ....memory.index_spaces import KvPage
from ....memory.pages import PageAllocator, PageGrant, pages_for
from ....memory.prefix_cache import PrefixCache
from .request import Prompt, Refusal


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """The pages of the prompt, which prefill or this server will write, and a grant for each waiting member."""

    prompt: PageGrant[KvPage]
    members: list[PageGrant[KvPage]]
    prefix_tokens: int
    """Tokens at the start of the prompt whose KV is in cached pages, or is copied from one."""
    copied: PageGrant[KvPage] | None = None
    """Holds the cached page whose first tokens are copied to the first new page of the prompt."""


def pages_needed(prompt_tokens: int, samples: int, kv_tokens: int, page_size: int) -> int:
    """Pages of `samples` sequences of `kv_tokens` tokens that share the full pages of their prompt."""
    shared = prompt_tokens // page_size
    return shared + samples * (pages_for(kv_tokens, page_size) - shared)


def reserve(
    prompt: Prompt,
    pages: PageAllocator[KvPage],
    cache: PrefixCache,
    *,
    page_size: int,
    growth_tokens: int,
    most_cached: int,
    within_pages: bool = False,
) -> Reservation | None:
    """Reserve pages for the prompt, and for each waiting member its own last page and some growth; None if there are
    not enough. At most `most_cached` tokens are taken from the cache; with `within_pages`, the prefix may end inside a
    page.

    The first member uses the last page of the prompt itself; the others get a copy of it. After a failed reservation
    the prompt is matched with the cache again, which takes milliseconds for a long prompt, only when pages have become
    free.
    """
    samples, last = len(prompt.waiting), prompt.refusal
    if last is not None and last[1:] == (samples, pages.chances) and not pages.can_grant(last.pages):
        return None
    prefix = cache.match(prompt.token_ids, most_cached)
    count, full = pages_for(prompt.tokens, page_size), prompt.tokens // page_size
    most_tokens = [min(request.most_kv_tokens, prompt.tokens + growth_tokens) for request in prompt.waiting]
    growth = [max(0, pages_for(tokens, page_size) - count) for tokens in most_tokens]
    copies = (count - full) * (samples - 1)
    # count everything before taking anything: a grant evicts cached pages, which would be lost if another grant fails
    wanted = count - len(prefix) + copies + sum(growth)
    if not pages.can_grant(wanted, prefix):
        prompt.refusal = Refusal(wanted + pages.idle_among(prefix), samples, pages.chances)
        return None
    partial = cache.match_within(prompt.token_ids, prefix, most_cached) if within_pages else None
    copied: PageGrant[KvPage] | None = None
    if partial is not None and wanted + pages.idle_among([*prefix, partial.page]) <= pages.available:
        copied = _granted(pages.grant(f"copy for prompt {prompt.prompt_id}", 0, shared=[partial.page]))
    grant = _granted(pages.grant(f"prompt {prompt.prompt_id}", count - len(prefix), shared=prefix))
    members: list[PageGrant[KvPage]] = []
    for request, more in zip(prompt.waiting, growth, strict=True):
        shared = grant.pages if not members else grant.pages[:full]
        members.append(_granted(pages.grant(request.rid, count - len(shared), more, shared)))
    partly = partial.tokens if partial is not None and copied is not None else 0
    return Reservation(grant, members, len(prefix) * page_size + partly, copied)


def _granted(grant: PageGrant[KvPage] | None) -> PageGrant[KvPage]:
    assert grant is not None, "a grant failed after can_grant()"
    return grant
