"""Sends prompts to prefill servers, or starts them here: takes them from the queue, reserves memory, and tracks them
until their KV arrives.

It knows prompts, pages and peers. It ends no request: the scheduler decides what to do after a failed attempt.
"""

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence

from ....memory.index_spaces import KvPage
from ....memory.pages import PageAllocator, pages_for
from ....memory.prefix_cache import PrefixCache
from ....transfer.plan.staged_regions import StagedRegion
from ....transfer.protocol.messages import Abort, ChunkArrived, InstanceId, KvDestination, PrefillDone, TransferKey
from ...messages.effects import ConnectPeer, SendToPeer
from ...messages.lifecycle import State
from ...messages.outbox import Outbox
from ...rates import Rates
from ...store.kv_store import KvStore
from ..memory.request_memory import RequestMemory
from ..requests.limits import DecodeLimits
from ..requests.request import Attempt, LocalPrompt, Prompt, Request
from ..requests.reservation import Reservation, pages_needed, reserve
from .kv_path import PathInputs, choose_path
from .local_prefill import LocalLimits, LocalPrefill
from .placement import Placement
from .placer import Placer, most_cached
from .prefill_peers import PrefillPeer, PrefillPeers, Selection, prompt_kind
from .prompt_queue import PromptQueue
from .quarantine import Quarantine, QuarantinedPages
from .queue_pace import QueuePace
from .staging import RankRing, StagedArrivals

MAX_OVERTAKES = 16
"""How many smaller prompts may overtake a prompt that waits for memory. After that, free memory is kept for it."""
MAX_MISFITS = 8
"""A turn stops after this many prompts that do not fit."""


class PrefillDispatcher:
    """Owns the queue, the prefill servers, the transfers in flight and the quarantine of those that were given up."""

    def __init__(
        self,
        limits: DecodeLimits,
        pages: PageAllocator[KvPage],
        cache: PrefixCache,
        memory: RequestMemory,
        counters: "collections.Counter[str]",
        outbox: Outbox,
        rings: Sequence[RankRing] = (),
        kv_store: KvStore[LocalPrompt] | None = None,
    ) -> None:
        self.limits = limits
        self._kv_store = kv_store
        self.counters = counters
        self.queue = PromptQueue()
        self.pace = QueuePace()
        self.peers = PrefillPeers(limits.dispatch)
        self.rates = Rates()
        local_limits = LocalLimits(
            limits.page_size,
            limits.max_step_tokens,
            limits.itl_target_s,
            limits.stages,
            shares_prefixes=limits.prefix_cache and not limits.hisparse,
        )
        self.local = LocalPrefill(local_limits, self.rates)
        self.placer = Placer(
            limits,
            queue=self.queue,
            peers=self.peers,
            local=self.local,
            rates=self.rates,
            cache=cache,
            memory=memory,
            kv_store=kv_store,
            counters=counters,
        )
        self.quarantine = Quarantine(limits.quarantine_s)
        self.prefilling: dict[TransferKey, Prompt] = {}
        self.staging = StagedArrivals(rings, limits.page_size, limits.quarantine_s, counters, outbox)
        self._outbox = outbox
        self._pages = pages
        self._cache = cache
        self._memory = memory
        self._prompt_ids = itertools.count(1)

    def new_prompt(
        self,
        token_ids: tuple[int, ...],
        *,
        endpoint: str | None = None,
        room: int | None = None,
        priority: int = 0,
        output_tokens: int = 0,
        page_hashes: Mapping[int, Sequence[int]] | None = None,
        now: float,
    ) -> Prompt:
        """A prompt that is not in the queue yet. Prompt ids are unique on this server."""
        return Prompt(
            next(self._prompt_ids),
            token_ids,
            endpoint=endpoint,
            room=room,
            priority=priority,
            output_tokens=output_tokens,
            page_hashes=page_hashes,
            now=now,
        )

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
        prompt.prompt_id = next(self._prompt_ids)
        prompt.refusal = prompt.cached_estimate = prompt.awaited = None
        self.enqueue(prompt, now)
        if prompt.endpoint is not None:
            self._outbox.append(ConnectPeer(prompt.endpoint))

    def recompute(self, request: Request, now: float) -> None:
        """Queue a request whose KV was dropped, before new ones. Its output becomes part of the prompt."""
        old = request.prompt
        request.prompt = self.new_prompt(
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

    def peer_up(
        self,
        instance: InstanceId,
        endpoint: str,
        capacity: float,
        staged: Iterable[StagedRegion],
        *,
        writes_both: bool = False,
        shares_cpu: bool = False,
    ) -> None:
        """A prefill server paired; see PrefillPeer."""
        self.peers.up(instance, endpoint, capacity, writes_both=writes_both, shares_cpu=shares_cpu)
        self.staging.peer_up(instance, staged)
        for prompt in self.queue:
            prompt.refused_since = None  # this server has not refused it

    def peer_closed(self, instance: InstanceId, now: float) -> None:
        """The connection to a prefill server is closed."""
        self.quarantine.writer_closed(instance, now)
        self.staging.peer_closed(instance, now)

    def take_released(self, now: float) -> list[QuarantinedPages]:
        """The pages whose quarantine is over; the caller releases their grants."""
        self.staging.due(now)
        return self.quarantine.take_due(now, in_use=self.staging.scattering | self._memory.copies.keys)

    def of_peer(self, instance: InstanceId) -> list[Prompt]:
        """Prompts that this prefill server has and has not finished."""
        attempts = ((prompt, _attempt(prompt)) for prompt in self.prefilling.values())
        return [prompt for prompt, attempt in attempts if attempt.instance == instance and not attempt.written]

    def chunk_arrived(self, chunk: ChunkArrived) -> bool:
        """Record a chunk; False if its transfer is not in flight."""
        prompt = self.prefilling.get(chunk.key)
        if prompt is None:
            return False
        attempt = _attempt(prompt)
        attempt.begun = True
        if chunk.token_start < chunk.token_end:
            attempt.chunks.append(chunk)
        computed = chunk.token_end - max(chunk.token_start, attempt.expected_cached or 0)
        tokens = min(attempt.tokens_left, max(0, computed))
        window = self.peers.window(attempt.instance)
        if tokens and window is not None:
            attempt.tokens_left -= tokens
            window.computed(attempt.kind, tokens)
        return True

    def written(self, done: PrefillDone) -> bool:
        """Prefill has written everything. Returns whether all of it is in its pages; if not, `staging.scattered()`
        returns `done` later.
        """
        prompt = self.prefilling.get(done.key)
        if prompt is not None and not (attempt := _attempt(prompt)).written:
            attempt.written = True
            self._leave_prefill(attempt)
        return not self.staging.hold(done)

    def check_complete(self, prompt: Prompt, done: PrefillDone) -> str | None:
        """What is missing, if anything, from a transfer that prefill reports as done."""
        arrived = _attempt(prompt).tokens_arrived()
        if arrived != prompt.tokens:
            return f"prefill reported the end after {arrived} of {prompt.tokens} prompt tokens"
        if len(done.first_tokens) < prompt.samples:
            return f"prefill sent {len(done.first_tokens)} first tokens for {prompt.samples} samples"
        return None

    def expected_wait_s(self, now: float) -> float:
        """Expected time in the queue of a prompt that arrives now; at most `queue_timeout_s`."""
        return self.pace.wait_s(len(self.queue), now, most_s=self.limits.queue_timeout_s)

    def dispatch(self, now: float, *, above: int | None = None, keep: int = 0) -> list[int]:
        """Dispatch prompts in the order of the queue; with `above`, only those of a higher priority. `keep` pages stay
        free. Returns the priorities of the dispatched prompts.

        Smaller prompts may overtake one that does not fit, MAX_OVERTAKES times. A prompt whose prefill server is absent
        or busy does not delay others.
        """
        blocked: list[Prompt] = []
        sent: list[int] = []
        busy: set[str | None] = set()
        places: dict[Prompt, tuple[Placement, Selection | None]] = {}

        self.peers.release_held()

        def may_send(prompt: Prompt) -> bool | None:
            """Servers that take no prompt, although they are there, are busy."""
            selection = self.peers.select(prompt, now)
            is_open = selection is not None and selection.is_open
            placement = self.placer.place(prompt, now, remote_open=is_open)
            places[prompt] = placement, selection
            if placement.where != "wait":
                return True
            if self.can_prefill(prompt.endpoint, prompt.tokens):
                busy.add(prompt.endpoint)
            if prompt.awaited is not None:
                return None
            if selection is None or is_open or not selection.cached:
                return False
            self.peers.hold(prompt, selection)
            return None

        for prompt in self.queue.in_order(may_send):
            if len(blocked) >= MAX_MISFITS or any(other.overtaken >= MAX_OVERTAKES for other in blocked):
                break
            if above is not None and prompt.priority <= above:
                break
            placement, selection = places[prompt]
            if keep and self._pages.available + self._pages.lent < keep + self._most_pages(prompt):
                break
            if placement.where == "local" and not self._memory.may_compute(prompt, shrink=True):
                blocked.append(prompt)
                continue
            reservation = reserve(
                prompt,
                self._pages,
                self._cache,
                page_size=self.limits.page_size,
                growth_tokens=self.limits.growth_tokens,
                most_cached=most_cached(prompt) if placement.where == "local" else prompt.tokens,
                local=placement.where == "local",
                window=self.limits.window,
            )
            if reservation is None:
                blocked.append(prompt)
                continue
            self.counters["overtakes"] += bool(blocked)
            for other in blocked:
                other.overtaken += 1
            self.counters[f"{placement.where}_prefill_{placement.reason}"] += 1
            if placement.where == "local":
                self._reserved(prompt, reservation, State.COMPUTING, now)
                local = self.local.start(prompt, reservation.prefix_tokens, now)
                self._memory.allocate_for_prompt(local)
                if not self._load_stored(local):
                    self.start_local(local)
            else:
                assert selection is not None, f"prompt {prompt.prompt_id} has no prefill server"
                self._send(prompt, reservation, selection, now)
            sent.append(prompt.priority)
        self.pace.note(len(self.queue), busy, now)
        return sent

    def start_local(self, local: LocalPrompt) -> None:
        """Compute a prompt, as soon as its cached prefix is in its hot buffer (HiSparse)."""
        if self._memory.open_for_prompt(local):
            self.local.loaded(local)

    def _load_stored(self, local: LocalPrompt) -> bool:
        """Load what the KV store has of a prompt into its pages: with HiSparse, rows go to host memory. Returns False
        if there is nothing to wait for.
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
            tokens_per_s=self.rates.local_tokens.per_s,
        )

    def can_compute(self, tokens: int) -> bool:
        """Whether this server may compute prompts, and can compute one of so many tokens."""
        return tokens <= self.largest_local

    @property
    def largest_local(self) -> float:
        """Tokens of the longest prompt that this server may and can compute; 0 if it computes none."""
        return self._memory.largest_prompt if self.limits.local_prefill != "never" else 0

    def can_prefill(self, endpoint: str | None, tokens: int) -> bool:
        """Whether there is a server that may compute prompts of so many tokens for this endpoint."""
        return self.can_compute(tokens) or (
            self.limits.local_prefill != "always" and self.peers.absent_since(endpoint) is None
        )

    def largest_prompt(self, endpoint: str | None) -> float:
        """Tokens of the longest prompt that can be computed here or by prefill servers; inf if none of them is paired
        yet.
        """
        if self.limits.local_prefill == "always":
            return self.largest_local
        return max(self.largest_local, self.peers.largest_prompt(endpoint))

    def _most_pages(self, prompt: Prompt) -> int:
        """Pages that it needs at dispatch if nothing of it is cached."""
        samples, page_size = len(prompt.waiting), self.limits.page_size
        most_tokens = prompt.tokens + self.limits.growth_tokens
        return pages_needed(prompt.tokens, samples, most_tokens, page_size, self.limits.window)

    def _reserved(self, prompt: Prompt, reservation: Reservation, state: State, now: float) -> None:
        """A prompt has its pages, and leaves the queue."""
        self.queue.take(prompt)
        prompt.grant = reservation.prompt
        busy_s = self.pace.busy_s(prompt.endpoint, now) - prompt.busy_s_when_queued
        for request, grant in zip(prompt.waiting, reservation.members, strict=True):
            request.grant = grant
            request.prefill_wait_s += busy_s
            request.lifecycle.advance(State.RESERVED, now)
            request.lifecycle.advance(state, now)

    def _send(self, prompt: Prompt, reservation: Reservation, selection: Selection, now: float) -> None:
        peer, expected = selection.peer, selection.cached
        self._reserved(prompt, reservation, State.PREFILLING, now)
        prompt.attempts += 1
        key = TransferKey(prompt.prompt_id, prompt.attempts)
        kind = prompt_kind(prompt, expected)
        cached = reservation.prefix_tokens - reservation.unseen_tokens
        tokens = max(1, prompt.tokens - max(cached, expected or 0))
        members = prompt.waiting
        first = members[0]
        choice = choose_path(self._path_inputs(prompt, peer))
        prompt.attempt = attempt = Attempt(
            key, peer.instance, reservation.prefix_tokens, kind, tokens, expected_cached=expected
        )
        attempt.unseen_tokens = reservation.unseen_tokens
        self.counters[f"dispatch_{selection.reason}"] += 1
        if expected is not None:
            self.counters["dispatch_tokens_expected"] += expected
            peer.cache.sent(prompt.page_hashes[peer.cache.page_size or 0], expected, now)
        first_new, within = divmod(reservation.prefix_tokens, self.limits.page_size)
        new_pages = reservation.prompt.pages[first_new:]
        if reservation.copied is not None:
            (source,) = reservation.copied.pages
            self._memory.copy_page(source, new_pages[0], tokens=within)
            self._memory.release_grant(reservation.copied)
        destinations: list[Sequence[int]] = [new_pages]
        if self._memory.hot is not None:
            self.counters[f"kv_path_{choice.path}_{choice.reason}"] += 1
            if choice.path == "gpu":
                self._memory.open_for_arrival(prompt, attempt, reservation.prompt.pages)
                destinations.append(self._memory.hot.announced(attempt.hot_pages[first_new:]))
        if within:
            count = prompt.tokens - reservation.prefix_tokens
            destinations = [self._rows(pages, within, count) for pages in destinations]
        self.prefilling[key] = prompt
        self.placer.sent(prompt, attempt)
        peer.window.sent(kind, tokens)
        message = KvDestination(
            key=key,
            rid=first.rid,
            sampling=prompt.first_sampling,
            timeout_s=min(self.limits.prefill_timeout_s, max(request.deadline for request in members) - now),
            granularity="token" if within else "page",
            prefix_tokens=reservation.prefix_tokens,
            room=prompt.room,
            verify=self.limits.verify_kv,
            samples=prompt.samples,
            output_tokens=prompt.output_tokens,
            logprobs=first.logprobs,
            priority=prompt.priority,
            enable_hisparse=choice.path == "host",
            traceparent=prompt.traceparent,
        )
        self.staging.open(key, peer.instance, reservation.prefix_tokens, prompt.tokens, new_pages)
        self._outbox.append(SendToPeer(peer.instance, message, (prompt.token_ids, *map(tuple, destinations))))

    def _rows(self, pages: Sequence[int], first: int, count: int) -> list[int]:
        """Rows of a pool for `count` tokens, from offset `first` of the first page on."""
        size = self.limits.page_size
        return [pages[at // size] * size + at % size for at in range(first, first + count)]

    def _path_inputs(self, prompt: Prompt, peer: PrefillPeer) -> PathInputs:
        """What the path of a prompt to this server depends on."""
        hot, members = self._memory.hot, prompt.waiting
        return PathInputs(
            hisparse=hot is not None,
            peer_writes_both=peer.writes_both,
            samples=len(members),
            new_tokens=max(request.sampling.max_new_tokens - len(request.output_ids) for request in members),
            pages=pages_for(prompt.tokens + 1, self.limits.page_size),
            first_pages=hot.limits.buffer_pages if hot is not None else 0,
            free_pages=hot.pages.available if hot is not None else 0,
            free_slots=hot.free_slots if hot is not None else 0,
            ahead=sum(len(other.waiting) for other in self.prefilling.values() if not _attempt(other).hot_pages),
            settled=hot is None or hot.settled,
        )

    def give_up(self, prompt: Prompt, reason: str, *, abort: bool) -> None:
        """Quarantine the pages of an attempt. With `abort`, tell its writer to stop."""
        attempt = _attempt(prompt)
        prompt.last_problem = reason
        attempt.given_up = True
        if abort:
            self._outbox.append(SendToPeer(attempt.instance, Abort(attempt.key, reason)))
        hot = self._memory.hot if attempt.hot_pages else None
        self.quarantine.put(prompt, hot.quarantine(prompt.prompt_id) if hot is not None else None)

    def writer_stopped(self, key: TransferKey, *, late_writes: bool, now: float) -> None:
        """The writer of a transfer issues no more writes, neither into its pages nor into the staging rings."""
        self.quarantine.writer_stopped(key, late_writes=late_writes, now=now)
        self.staging.writer_stopped(key, late_writes=late_writes, now=now)

    def leave(self, prompt: Prompt) -> None:
        """The transfer is done or given up: nothing more of it is scattered."""
        attempt = _attempt(prompt)
        self.staging.close(attempt.key)
        del self.prefilling[attempt.key]
        self.placer.returned(attempt)
        if not attempt.written:
            self._leave_prefill(attempt)

    def _leave_prefill(self, attempt: Attempt) -> None:
        """Prefill has nothing more to do for this attempt: remove it from the dispatch window, if the server is still
        paired.
        """
        window = self.peers.window(attempt.instance)
        if window is not None:
            window.returned(attempt.kind, attempt.tokens_left)
        attempt.tokens_left = 0

    def withdraw(self, prompt: Prompt, reason: str, now: float) -> None:
        """No request needs this prompt any more: remove it from the queue, or stop its writer."""
        if prompt in self.queue:
            self.queue.remove(prompt)
            return
        attempt = _attempt(prompt)
        if prompt.grant is not None:  # not in quarantine yet
            self.give_up(prompt, reason, abort=not attempt.written)
            if attempt.written:
                self.writer_stopped(attempt.key, late_writes=False, now=now)
        self.leave(prompt)


def _attempt(prompt: Prompt) -> Attempt:
    assert prompt.attempt is not None, f"prompt {prompt.prompt_id} has no attempt"
    return prompt.attempt
