"""Pages for a prompt and its samples: how many, and all of them or none."""

import dataclasses

from ....memory.index_spaces import KvPage
from ....memory.pages import PageAllocator, PageGrant, pages_for
from ....memory.prefix_cache import PrefixCache
from .request import Prompt, Refusal


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """What was taken: the prompt's pages, which prefill will write, and a grant for each waiting member."""

    prompt: PageGrant[KvPage]
    members: list[PageGrant[KvPage]]
    prefix_tokens: int
    """Tokens at the head of the prompt whose KV is in shared pages already."""


def pages_needed(prompt_tokens: int, samples: int, kv_tokens: int, page_size: int) -> int:
    """Pages of `samples` sequences of `kv_tokens` tokens that share the full pages of their prompt."""
    shared = prompt_tokens // page_size
    return shared + samples * (pages_for(kv_tokens, page_size) - shared)


def reserve(
    prompt: Prompt, pages: PageAllocator[KvPage], cache: PrefixCache, *, page_size: int, growth_tokens: int
) -> Reservation | None:
    """Take pages for the prompt, and for each waiting member its own last page and some growth; None if there are none.

    The first member goes on in the prompt's own last page; the others will get a copy of it. A prompt that was refused
    is not looked for in the cache again, which takes milliseconds for a long one, before there is a chance.
    """
    samples, last = len(prompt.waiting), prompt.refusal
    if last is not None and last[1:] == (samples, pages.chances) and not pages.can_grant(last.pages):
        return None
    prefix = cache.match(prompt.token_ids, prompt.tokens)
    count, full = pages_for(prompt.tokens, page_size), prompt.tokens // page_size
    most_tokens = [min(request.most_kv_tokens, prompt.tokens + growth_tokens) for request in prompt.waiting]
    growth = [max(0, pages_for(tokens, page_size) - count) for tokens in most_tokens]
    copies = (count - full) * (samples - 1)
    # all of it is counted before anything is taken: a grant evicts cached pages, and would have done so for nothing
    wanted = count - len(prefix) + copies + sum(growth)
    if not pages.can_grant(wanted, prefix):
        prompt.refusal = Refusal(wanted + pages.idle_among(prefix), samples, pages.chances)
        return None
    grant = _taken(pages.grant(f"prompt {prompt.prompt_id}", count - len(prefix), shared=prefix))
    members: list[PageGrant[KvPage]] = []
    for request, more in zip(prompt.waiting, growth, strict=True):
        shared = grant.pages if not members else grant.pages[:full]
        members.append(_taken(pages.grant(request.rid, count - len(shared), more, shared)))
    return Reservation(grant, members, len(prefix) * page_size)


def _taken(grant: PageGrant[KvPage] | None) -> PageGrant[KvPage]:
    assert grant is not None, "it was counted"
    return grant
