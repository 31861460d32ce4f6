"""Takes prompts from the queue, decides where each is computed, reserves its memory, and sends it there.

It ends no request: the scheduler decides what to do after a failed attempt.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ....transfer.plan.staged_regions import StagedRegion
from ...chunking.fair_queue import MAX_MISFITS, MAX_OVERTAKES
from ...messages.effects import ConnectPeer
from ..memory.reservation import Reservation, fits_to_compute, pages_needed, reserve
from ..memory.resources import Resources
from ..placement.peers import PrefillPeer, PrefillPeers, Selection
from ..placement.place import Placement
from ..requests.request import LocalPrompt, Prompt, Request
from .computing import LocalPrefill
from .placer import Placer, most_cached
from .prefilling import RemotePrefill
from .staging import RankRing
from .waiting import PromptQueue, QueuePace


class Placed(NamedTuple):
    """A prompt to send, and its pages. Without a `selection`, this server computes it."""

    prompt: Prompt
    reservation: Reservation
    selection: Selection | None


class PrefillDispatcher:
    """Owns the queue, the prefill servers, and the prompts that they (`remote`) and this server (`local`) compute."""

    def __init__(self, resources: Resources, rings: Sequence[RankRing]) -> None:
        self.limits = resources.limits
        self._kv_store = resources.kv_store
        self._rates = resources.rates
        self._counters = resources.counters
        self._outbox = resources.outbox
        self._pages = resources.pages
        self._cache = resources.cache
        self._memory = resources.memory
        self.queue = PromptQueue()
        self.pace = QueuePace()
        self.peers = PrefillPeers(self.limits.dispatch)
        self.local = LocalPrefill(self.limits, self._rates, self._counters)
        self.placer = Placer(resources, queue=self.queue, peers=self.peers, local=self.local)
        self.remote = RemotePrefill(resources, rings, peers=self.peers, placer=self.placer)
        self._prompt_ids = itertools.count(1)

    def next_prompt_id(self) -> int:
        """An id for a new prompt, unique on this server."""
        return next(self._prompt_ids)

    def enqueue(self, prompt: Prompt, now: float, *, again: bool = False) -> None:
        """Queue a prompt; `again` if it was dispatched before."""
        prompt.busy_s_when_queued = self.pace.busy_s(prompt.endpoint, now)
        self.queue.push(prompt, again=again)

    def release(self, prompt: Prompt, now: float) -> None:
        """Remove a queued prompt that another scheduler adopts."""
        self.queue.remove(prompt)
        busy_s = self.pace.busy_s(prompt.endpoint, now) - prompt.busy_s_when_queued
        for request in prompt.waiting:
            request.prefill_wait_s += busy_s

    def adopt(self, prompt: Prompt, now: float) -> None:
        """Queue a prompt that another scheduler has released."""
        prompt.prompt_id = self.next_prompt_id()
        prompt.refusal = prompt.cached_estimate = prompt.awaited = None
        prompt.cached_at.clear()
        self.enqueue(prompt, now)
        if prompt.endpoint is not None:
            self._outbox.append(ConnectPeer(prompt.endpoint))

    def recompute(self, request: Request, now: float) -> None:
        """Queue a request whose KV was dropped, ahead of new prompts. Its output so far becomes part of its prompt."""
        old = request.prompt
        request.prompt = Prompt(
            self.next_prompt_id(),
            (*request.prompt_ids, *request.output_ids),
            endpoint=old.endpoint,
            priority=request.priority,
            output_tokens=len(request.output_ids),
            page_hashes=old.page_hashes,
            now=now,
        )
        request.prompt.traceparent = old.traceparent
        request.prompt.members.append(request)
        self.enqueue(request.prompt, now, again=True)
        if old.endpoint is not None:
            self._outbox.append(ConnectPeer(old.endpoint))  # the connection may have been closed since

    def peer_up(self, peer: PrefillPeer, staged: Iterable[StagedRegion]) -> None:
        """A prefill server paired."""
        self.peers.up(peer)
        self.remote.staging.peer_up(peer.instance, staged)
        for prompt in self.queue:
            prompt.refused_since = None  # the new server has not refused it

    def expected_wait_s(self, now: float) -> float:
        """Expected time in the queue of a prompt that arrives now; at most `queue_timeout_s`."""
        return self.pace.wait_s(len(self.queue), now, most_s=self.limits.queue_timeout_s)

    def placed(self, now: float, *, above: int | None = None, keep: int = 0) -> Iterator[Placed]:
        """Yield the prompts that can be sent, in the order of the queue; with `above`, only those of a higher priority.
        `keep` pages stay free. The caller sends each prompt before it asks for the next one.

        Smaller prompts may overtake one that does not fit, MAX_OVERTAKES times; then free memory is kept for it. A
        prompt whose prefill server is absent or busy does not delay others.
        """
        blocked: list[Prompt] = []
        busy: set[str | None] = set()
        places: dict[Prompt, tuple[Placement, Selection | None]] = {}

        self.peers.release_held()

        def may_send(prompt: Prompt) -> bool | None:
            """Place a prompt. True: send it. False: it waits, with all prompts of its lane. None: only this prompt
            waits, for a prefix or for one server. Endpoints whose servers take no prompt are added to `busy`.
            """
            selection = self.peers.select(prompt, now)
            placement, starts = self.placer.place(prompt, selection, now)
            places[prompt] = placement, selection
            if starts:
                return True
            if self.can_prefill(prompt.endpoint, prompt.tokens):
                busy.add(prompt.endpoint)
            if prompt.awaited is not None:
                return None
            if selection is None or selection.is_open or not selection.cached:
                return False
            self.peers.hold(prompt, selection)
            return None

        for prompt in self.queue.in_order(may_send):
            if len(blocked) >= MAX_MISFITS or any(other.overtaken >= MAX_OVERTAKES for other in blocked):
                break
            if above is not None and prompt.priority <= above:
                break
            placement, selection = places[prompt]
            is_local = placement.where == "local"
            if keep and self._pages.available + self._pages.lent < keep + self._most_pages(prompt):
                break
            if is_local and not self._memory.may_compute(prompt, shrink=True):
                blocked.append(prompt)
                continue
            reservation = reserve(
                prompt,
                self._pages,
                self._cache,
                self.limits,
                most_cached=most_cached(prompt) if is_local else prompt.tokens,
                local=is_local,
            )
            if reservation is None:
                blocked.append(prompt)
                continue
            self._counters["overtakes"] += bool(blocked)
            for other in blocked:
                other.overtaken += 1
            self._counters[f"{placement.where}_prefill_{placement.reason}"] += 1
            assert is_local or selection is not None, f"prompt {prompt.prompt_id} has no prefill server"
            yield Placed(prompt, reservation, None if is_local else selection)
        self.pace.note(len(self.queue), busy, now)

    def compute(self, prompt: Prompt, reservation: Reservation, now: float) -> bool:
        """Compute a prompt that has its pages on this server. Returns False if a part of it is loaded first."""
        local = self.local.start(prompt, reservation.prefix_tokens, now)
        self._memory.allocate_for_prompt(local)
        return not self._load_stored(local) and self.start_local(local)

    def start_local(self, local: LocalPrompt) -> bool:
        """Start to compute a prompt. With HiSparse, its cached prefix may have to be in its hot buffer first: then this
        returns False.
        """
        opened = self._memory.open_for_prompt(local)
        if opened:
            self.local.loaded(local)
        return opened

    def _load_stored(self, local: LocalPrompt) -> bool:
        """Start to load what the KV store has of a prompt into its pages (with HiSparse, in host memory). Returns False
        if no load was started.
        """
        if self._kv_store is None:
            return False
        return self._kv_store.load(
            local,
            local.prompt.chain or self._kv_store.new_chain(),
            local.prompt.token_ids,
            local.pages,
            cached=local.cached,
            freed=self._cache.first_needed(local.cached // self.limits.page_size),
            most=most_cached(local.prompt),
            tokens_per_s=self._rates.local_tokens.per_s,
        )

    def can_compute(self, tokens: int) -> bool:
        """Whether this server may compute prompts, and can compute one of `tokens` tokens, for one sample."""
        return tokens <= self.largest_local

    def can_compute_prompt(self, prompt: Prompt) -> bool:
        """Whether this server may and can compute a prompt for all its samples."""
        return self.can_compute(prompt.tokens) and fits_to_compute(prompt, self._pages.num_pages, self.limits)

    @property
    def largest_local(self) -> float:
        """Tokens of the longest prompt that this server may and can compute; 0 if it computes none."""
        return self._memory.largest_prompt if self.limits.local_prefill != "never" else 0

    def can_prefill(self, endpoint: str | None, tokens: int) -> bool:
        """Whether there is a server that may compute a prompt of `tokens` tokens for this endpoint."""
        return self.can_compute(tokens) or (
            self.limits.local_prefill != "always" and self.peers.absent_since(endpoint) is None
        )

    def largest_prompt(self, endpoint: str | None) -> float:
        """Tokens of the longest prompt that this server or a prefill server can compute; inf while no prefill server is
        paired, because its limit is unknown.
        """
        if self.limits.local_prefill == "always":
            return self.largest_local
        return max(self.largest_local, self.peers.largest_prompt(endpoint))

    def _most_pages(self, prompt: Prompt) -> int:
        """Pages that a prompt needs at dispatch if no part of it is cached."""
        samples, page_size = len(prompt.waiting), self.limits.page_size
        most_tokens = prompt.tokens + self.limits.growth_tokens
        return pages_needed(prompt.tokens, samples, most_tokens, page_size, self.limits.window)

    def leave_queue(self, prompt: Prompt, reservation: Reservation, now: float) -> None:
        """A prompt has its pages, and leaves the queue."""
        self.queue.take(prompt)
        prompt.grant = reservation.prompt
        busy_s = self.pace.busy_s(prompt.endpoint, now) - prompt.busy_s_when_queued
        for request, grant in zip(prompt.waiting, reservation.members, strict=True):
            request.grant = grant
            request.prefill_wait_s += busy_s

    def withdraw(self, prompt: Prompt, reason: str, now: float) -> None:
        """No request needs this prompt any more: remove it from the queue, or stop its writer."""
        if prompt in self.queue:
            self.queue.remove(prompt)
            return
        self.remote.withdraw(prompt, reason, now)
