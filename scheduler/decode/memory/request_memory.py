"""The memory of requests: pages that are reserved for a prompt and its samples, grow, and are cached in the end."""

import dataclasses
import math
from collections.abc import Iterable

from ....memory.index_spaces import KvPage
from ....memory.pages import PageAllocator, PageGrant, first_visible_page, most_visible_pages, pages_for
from ....memory.prefix_cache import InsertedPrefix, PrefixCache
from ...messages.effects import Outbox
from ...messages.ranks import CopyPage, DropPages, LoadPages, SavePages, WriteBackRows
from ...store.kv_store import KvStore
from ..requests.limits import DecodeLimits
from ..requests.request import LocalPrompt, Prompt, Refusal, Request
from .background_copies import BackgroundCopies, Copy
from .holds import Holds
from .hot_buffers import HotBuffers
from .prefix_inserts import PrefixInserts


class RequestMemory:
    """Allocates, extends and releases the memory of requests. Sends the ranks the commands that go with it.

    Released pages are free when nobody holds them any more and the commands sent so far are done (holds.py). From then
    on a prefill server may write them.

    If all layers have a sliding `window`, a request gives up the pages that its next step does not see. Such a page
    becomes the next page of the same request; if it is shared or cached, it is released instead.

    With HiSparse, requests have hot buffers too (hisparse_memory.py).
    """

    hot: HotBuffers | None = None

    def __init__(
        self,
        limits: DecodeLimits,
        allocator: PageAllocator[KvPage],
        cache: PrefixCache,
        kv_store: KvStore[LocalPrompt] | None,
        outbox: Outbox,
    ) -> None:
        self.allocator = allocator
        self.copies = BackgroundCopies()
        self.holds = Holds(allocator, limits.quarantine_s)
        self.inserts = PrefixInserts(self.holds, cache, kv_store, limits.page_size)
        self.write_backs: list[WriteBackRows] = []
        """Commands that `send_write_backs` will send (HiSparse)."""
        self._limits = limits
        self._page_size = limits.page_size
        self._window = limits.window
        self._cache = cache
        self._kv_store = kv_store
        self._outbox = outbox

    @property
    def idle(self) -> bool:
        """Nobody but a running request may touch pages."""
        return self.holds.idle and not self.copies.in_flight and not self.inserts.of_ended

    # -- before the batch ----------------------------------------------------------------------------------------

    @property
    def largest_prompt(self) -> float:
        """Tokens of the longest prompt that this server can compute. With a window, the pool must hold all pages of the
        prompt, and some for growth. Otherwise there is no limit for prompts, only the one for whole sequences.
        """
        if self._window is None:
            return math.inf
        growth = most_visible_pages(self._window, self._page_size) - 1
        return max(0, self.allocator.num_pages - growth) * self._page_size

    def may_compute(self, prompt: Prompt, *, shrink: bool) -> bool:  # noqa: ARG002
        """Whether a prompt that has its pages can be computed here: with HiSparse, whether it can get a hot buffer.
        With `shrink`, fully resident requests may become evicting for that.
        """
        return True

    def allocate_for_prompt(self, local: LocalPrompt) -> None:
        """Allocate a hot buffer, with HiSparse, for a prompt that has its pages; call after `may_compute`."""

    def open_for_prompt(self, local: LocalPrompt) -> bool:  # noqa: ARG002
        """Open the hot buffer of a prompt, with HiSparse. Returns False if the rows of its cached prefix are being
        copied: it can be computed when the copy has ended.
        """
        return True

    def pass_on_hot(self, local: LocalPrompt, request: Request | None) -> None:
        """A prompt is computed: give its hot buffer, if it has one, to this request, or release it."""

    def may_admit(self) -> bool:
        """Whether another request that has its pages can be admitted: with HiSparse it also needs a hot buffer."""
        return True

    def open_hot(self, request: Request) -> bool:  # noqa: ARG002
        """Allocate a hot buffer, with HiSparse, for a request that has its pages; call after `may_admit`. Returns False
        if its rows are being copied: it can run when the copy has ended.
        """
        return True

    # -- while it runs -------------------------------------------------------------------------------------------

    def grow(self, request: Request) -> bool:
        """Allocate memory for the row that the next step writes; False if no page is free, or if it `must_wait`."""
        tokens = request.kv_tokens + request.in_flight + 1
        grant = request.grant
        assert grant is not None, f"{request.rid} runs without pages"
        unseen = 0 if self._window is None else self.first_visible(tokens - 1)
        while len(grant.pages) * self._page_size < tokens:
            # steps access the pages of a request in order, so the next step may overwrite a page that earlier ones read
            if grant.freed < unseen and self.allocator.reuse_first(grant):
                continue
            self._free(grant, unseen)
            if not self.allocator.grow(grant):
                return False
        if grant.freed < unseen:
            self._free(grant, unseen)
        return True

    def must_wait(self, request: Request) -> bool:  # noqa: ARG002
        """Whether a request has to wait with its next step until its rows are in host memory: no hot page is free."""
        return False

    def unsaved(self, request: Request) -> bool:  # noqa: ARG002
        """Whether the rows of a request are only in its hot buffer, because the copy to host memory has not ended."""
        return False

    def fetches(self, batch: Iterable[Request]) -> bool:  # noqa: ARG002
        """Whether a decode step of these requests fetches rows, so that it cannot compute chunks of prompts."""
        return False

    def next_to_reopen(self, running: Iterable[Request], requests: int) -> Request | None:  # noqa: ARG002
        """An evicting request that should become fully resident again, or None. `requests` is the number of all open
        requests: pages are kept for those that have no hot buffer yet.
        """
        return None

    def reclaim_lent(self, running: Iterable[Request]) -> bool:  # noqa: ARG002
        """Reclaim pages that were lent to hot buffers, if they are needed. Returns whether more pages are free now."""
        return False

    def send_write_backs(self) -> None:
        """Copy the rows of arrived requests to host memory. Call it after the next step was sent to the ranks:
        otherwise the copy would delay the first step of a request.
        """
        self._outbox += self.write_backs
        self.write_backs.clear()

    @property
    def pages_pending(self) -> bool:
        """Whether pages become free when the commands or copies in flight are done."""
        return bool(self.holds.pending_grants) or self.copies.hold_pages

    def copy_page(self, source: KvPage, destination: KvPage, *, tokens: int | None = None) -> None:
        """Copy a page, or its first `tokens` tokens, in order with the steps."""
        self._outbox.append(CopyPage(self.holds.next_id(), source, destination, tokens))

    def copy_tail(self, prompt: Prompt, request: Request, grant: PageGrant[KvPage]) -> None:
        """Copy the last page of the prompt to a sample that has its own copy of that page. Samples share full pages;
        they write different tokens into the last one.
        """
        full, within = divmod(prompt.tokens, self._page_size)
        if within and request.pages[full] != grant.pages[full]:
            self.copy_page(grant.pages[full], request.pages[full])

    def first_visible(self, position: int) -> int:
        """The first page that the token at `position` sees."""
        return first_visible_page(position, self._window, self._page_size)

    def unreserved_growth(self, request: Request) -> int:
        """Pages that a request may still need beyond its reservation."""
        grant = request.grant
        assert grant is not None, f"{request.rid} runs without pages"
        held = len(grant.pages) - grant.freed
        most = growth_pages(held, grant.freed, request.most_kv_tokens, self._page_size, self._window)
        return max(0, most - grant.reserved)

    def _free(self, grant: PageGrant[KvPage], end: int) -> None:
        """Release the pages of a grant before page `end`, when all commands sent so far are done."""
        if grant.freed < end:
            self.holds.release(self.allocator.split(grant, end))

    # -- retraction ----------------------------------------------------------------------------------------------

    def pages_to_save(self, request: Request) -> int:
        """The pages that have the KV of a request."""
        return pages_for(request.kv_tokens, self._page_size) - self.first_visible(request.kv_tokens)

    def save(self, request: Request) -> None:
        """Copy the KV of a request to host memory, and take all its pages. The request must not be `unsaved`."""
        assert request.grant is not None, f"{request.rid} is saved without pages"
        first, copy = self.first_visible(request.kv_tokens), self.copies.begin("save", request, request.grant)
        copy.pages = request.saved_pages
        self._outbox.append(SavePages(copy.number, request.rid, tuple(request.pages[first : first + copy.pages])))
        self.close_hot(request)
        request.grant = None  # the hold of the request is that of the copy

    def restore(self, request: Request) -> bool:
        """Allocate pages for the saved KV of a request, and copy it there; False if pages are short."""
        most_tokens = min(request.most_kv_tokens, request.kv_tokens + 1 + self._limits.growth_tokens)
        first = self.first_visible(request.kv_tokens)
        growth = growth_pages(request.saved_pages, first, most_tokens, self._page_size, self._window)
        grant = request.grant = self.allocator.grant(request.rid, request.saved_pages, growth, freed=first)
        if grant is None:
            return False
        copy = self.copies.begin("restore", request, self.holds.hold(grant))
        self._outbox.append(LoadPages(copy.number, request.rid, tuple(grant.held)))
        request.saved_pages = 0
        return True

    def drop_saved(self, request: Request) -> None:
        """Drop the saved KV of a request."""
        self._outbox.append(DropPages(request.rid))
        request.saved_pages = 0

    # -- in the prefix cache -------------------------------------------------------------------------------------

    def load_stored(self, local: LocalPrompt, most: int, tokens_per_s: float | None) -> bool:
        """Start to load what the KV store has of the first `most` tokens of a prompt into its pages. Returns False if
        no load was started.
        """
        return self._kv_store is not None and self._kv_store.load(
            local,
            local.prompt.chain or self._kv_store.new_chain(),
            local.prompt.token_ids,
            local.pages,
            cached=local.cached,
            freed=self._cache.first_needed(local.cached // self._page_size),
            most=most,
            tokens_per_s=tokens_per_s,
        )

    def computed(self, local: LocalPrompt, end: int) -> None:
        """The first `end` tokens of a prompt are computed here: they are a prefix for others."""
        prompt = local.prompt
        assert prompt.grant is not None, f"prompt {prompt.prompt_id} is computed without pages"
        pages, freed = prompt.grant.pages, prompt.grant.freed
        self._cache.insert(prompt.token_ids, pages, prompt.inserted, end=end, freed=freed)
        self._free_unseen(prompt, end)

    def _free_unseen(self, prompt: Prompt, position: int) -> None:
        """Free the pages of a prompt that the token at `position` does not see, also those of its waiting requests."""
        if self._window is None:
            return
        unseen = self.first_visible(position)
        for grant in (prompt.grant, *(request.grant for request in prompt.waiting)):
            assert grant is not None, f"prompt {prompt.prompt_id} is computed without pages"
            self._free(grant, unseen)

    def insert_answer(self, request: Request) -> None:
        """Keep the full pages of a finished request in the prefix cache, and offer them to the KV store."""
        assert request.grant is not None, f"{request.rid} is {request.state.name} without pages"
        self.inserts.ended(request, request.grant, request.prompt_ids + tuple(request.output_ids[:-1]))

    # -- release -------------------------------------------------------------------------------------------------

    def release_copy(self, copy: Copy) -> None:
        """Release what a copy held that has ended. A request that ended during its "write_back" is cached then."""
        if copy.tokens:
            assert isinstance(copy.owner, Request), f"{copy.kind} is not of a request"
            self.inserts.ended(copy.owner, copy.grant, copy.tokens)
        self.holds.release(copy.grant)

    def close_hot(self, request: Request) -> None:
        """Release its hot buffer, if it has one. Its KV stays in its pages."""

    def release(self, request: Request) -> None:
        """Release all memory of a request, if it has any."""
        if request.grant is not None:
            self.holds.release(request.grant)
            request.grant = None

    def release_prompt(self, local: LocalPrompt) -> None:
        """Release all memory of a prompt that is computed here and that no request needs any more."""
        prompt = local.prompt
        grant, prompt.grant = prompt.grant, None
        assert grant is not None, f"prompt {prompt.prompt_id} was computed without pages"
        self.holds.release(grant)

    def quarantine(self, prompt: Prompt) -> None:
        """The attempt of a prompt was given up: its writer may still write its pages, and those of its hot buffer."""
        attempt, grant, prompt.grant = prompt.attempt, prompt.grant, None
        assert attempt is not None, f"prompt {prompt.prompt_id} has no attempt to quarantine"
        assert grant is not None, f"prompt {prompt.prompt_id} has no pages to quarantine"
        hot = self.hot if attempt.hot_pages else None
        self.holds.quarantine(attempt, grant, hot.quarantine(prompt.prompt_id) if hot is not None else None)

    def release_due(self, now: float) -> None:
        """Release the quarantined pages whose writer has stopped."""
        for quarantined in self.holds.take_due(now):
            self.holds.release(quarantined.grant)  # a CopyPage in flight may still access a page of it
            if quarantined.hot_grant is not None and self.hot is not None:
                self.hot.release_quarantined(quarantined.hot_grant)

    # -- status --------------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """Occupancy, for the metrics."""
        hot_grants = (each.hot_grant for each in self.holds.quarantined.values())
        return {
            "quarantined_pages": self.holds.quarantined_pages,
            "quarantined_hot_pages": sum(len(grant.pages) for grant in hot_grants if grant is not None),
            "cached_pages": len(self._cache),
            **(self._kv_store.gauges() if self._kv_store is not None else {}),
        }

    def check_integrity(self, requests: "dict[str, Request]", *, idle: bool) -> None:  # noqa: ARG002
        """Raise PageLeakError or AssertionError unless all memory is accounted for."""
        self.allocator.check_integrity(idle=idle)


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """The pages of the prompt, which prefill or this server will write, and a grant for each waiting member."""

    prompt: PageGrant[KvPage]
    members: list[PageGrant[KvPage]]
    inserted: InsertedPrefix
    """The part of the prompt in the prefix cache."""
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
    allocator: PageAllocator[KvPage],
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
    if last is not None and last[1:] == (samples, allocator.chances) and not allocator.can_grant(last.pages):
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
    if not allocator.can_grant(wanted, cached):
        prompt.refusal = Refusal(wanted + allocator.idle_among(cached), samples, allocator.chances)
        return None
    prompt.refusal = None
    within = not local and (bool(cached) or not first)
    partial = cache.match_within(prompt.token_ids, prefix, most_cached) if within else None
    copied: PageGrant[KvPage] | None = None
    if partial is not None and wanted + allocator.idle_among([*cached, partial.page]) <= allocator.available:
        copied = _granted(allocator.grant(f"copy for prompt {prompt.prompt_id}", 0, shared=[partial.page]))
    grant = _granted(allocator.grant(f"prompt {prompt.prompt_id}", count - begin, shared=cached, freed=first))
    owners = [(request.rid, more) for request, more in zip(prompt.waiting, growth, strict=True)]
    members: list[PageGrant[KvPage]] = []
    for some, shared in ((owners[:1], grant.pages[first:]), (owners[1:], grant.pages[first:full])):
        if some:
            members += allocator.grant_each(dict(some), count - first - len(shared), shared, first)
    partly = partial.tokens if partial is not None and copied is not None else 0
    unseen = first * page_size if not cached else 0
    return Reservation(grant, members, cache.after(prefix), begin * page_size + partly, unseen, copied)


def _granted(grant: PageGrant[KvPage] | None) -> PageGrant[KvPage]:
    assert grant is not None, "a grant failed after can_grant()"
    return grant
