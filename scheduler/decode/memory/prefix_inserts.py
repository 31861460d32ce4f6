"""Adds the pages of requests to the prefix cache: those of a long prompt a few in each turn."""

import collections
import dataclasses
from collections.abc import Sequence

from ....memory.index_spaces import KvPage
from ....memory.pages import PageGrant
from ....memory.prefix_cache import InsertedPrefix, PrefixCache
from ...messages.lifecycle import State
from ...store.kv_store import KvStore
from ..requests.request import LocalPrompt, Request
from .holds import Holds

PAGES_INSERTED = 256
"""Pages that one turn adds: about 0.3 ms."""
PAGES_AT_ONCE = 1024
"""Most pages of a request that are added when it ends, and in a turn while no request runs: about 5 ms."""
WITH_KV = (State.ARRIVED, State.OPENING, State.READY, State.RUNNING)
"""States in which the KV of all tokens but the newest is in the request's pages."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Ended:
    """A request that has ended, and what is in its pages. They are held until all of them are added."""

    request: Request
    grant: PageGrant[KvPage]
    tokens: Sequence[int]


class PrefixInserts:
    """Pages are added in the order of the sequence, so what is added is always a prefix."""

    def __init__(self, holds: Holds, cache: PrefixCache, kv_store: KvStore[LocalPrompt] | None, page_size: int) -> None:
        self._holds = holds
        self._cache = cache
        self._kv_store = kv_store
        self._page_size = page_size
        self.of_arrived: collections.deque[Request] = collections.deque()
        """Requests whose prompts are not added yet; some may have ended or been retracted."""
        self.of_ended: collections.deque[_Ended] = collections.deque()
        """Their pages are held to be added."""

    def arrived(self, request: Request) -> None:
        """The KV of its prompt is in its pages."""
        self.of_arrived.append(request)

    def ended(self, request: Request, grant: PageGrant[KvPage], tokens: Sequence[int]) -> None:
        """A request has finished, whose pages have the KV of `tokens`. Call this before they are released. If many
        pages are left, they are held and added later: those of a million tokens would hold the loop for 0.3 s.
        """
        ended = _Ended(request, grant, tokens)
        done = max(_inserted(request, grant).pages, grant.freed)
        if len(tokens) // self._page_size <= done + PAGES_AT_ONCE:
            self._add_ended(ended, len(tokens))
        else:
            self._holds.hold(grant)
            self.of_ended.append(ended)

    def add_some(self, *, running: bool) -> None:
        """Add a few pages. Call it when the ranks have their next step: to add all pages of a long prompt at once would
        delay its first token, and the tokens of others, by milliseconds.
        """
        while self.of_arrived and (self.of_arrived[0].grant is None or self.of_arrived[0].state not in WITH_KV):
            self.of_arrived.popleft()
        if self.of_arrived:
            request = self.of_arrived[0]
            tokens, grant = request.prompt_ids, request.grant
            assert grant is not None, f"{request.rid} is {request.state.name} without pages"
            inserted = _inserted(request, grant)
            end = (max(inserted.pages, grant.freed) + PAGES_INSERTED) * self._page_size
            self._cache.insert(tokens, grant.pages, inserted, end=end, freed=grant.freed)
            if end >= len(tokens) or inserted.complete:
                self.of_arrived.popleft()
        elif self.of_ended:
            ended = self.of_ended[0]
            done = max(_inserted(ended.request, ended.grant).pages, ended.grant.freed)
            end = (done + (PAGES_INSERTED if running else PAGES_AT_ONCE)) * self._page_size
            if self._add_ended(ended, end):
                self._holds.release(self.of_ended.popleft().grant)

    def drop_ended(self) -> None:
        """Give up the pages that are held to be added: a request needs some, or the cache is flushed."""
        while self.of_ended:
            self._holds.release(self.of_ended.popleft().grant)

    def _add_ended(self, ended: _Ended, end: int) -> bool:
        """Add its pages with the tokens before `end`; offer all to the KV store when all are added. Those of its prompt
        count for all samples: 16 samples of a prompt of 131,072 tokens that ended at once held the loop for 0.2 s,
        because each looked for all pages of it. Returns whether nothing is left to add.
        """
        grant, tokens, prompt = ended.grant, ended.tokens, ended.request.prompt
        inserted = _inserted(ended.request, grant)
        of_prompt = len(prompt.token_ids)
        if len(prompt.members) > 1 and inserted.pages <= of_prompt // self._page_size:
            self._cache.insert(tokens, grant.pages, inserted, end=min(end, of_prompt), freed=grant.freed)
            prompt.inserted.continue_at(inserted)
        if end < len(tokens):
            self._cache.insert(tokens, grant.pages, inserted, end=end, freed=grant.freed)
            if not inserted.complete:
                return False
        self._cache.insert(tokens, grant.pages, inserted, freed=grant.freed)
        if self._kv_store is not None:
            self._kv_store.offer(self._kv_store.new_chain(), tokens, inserted)
        return True


def _inserted(request: Request, grant: PageGrant[KvPage]) -> InsertedPrefix:
    """Those of its pages that are in the cache. A sample that was retracted has other pages than its prompt since."""
    inserted, of_prompt = request.inserted, request.prompt.inserted
    if of_prompt.node is not None and grant.pages[of_prompt.pages - 1] == of_prompt.node.page:
        inserted.continue_at(of_prompt)
    return inserted
