"""Decides which QUEUED prompts are sent, and where each is computed: by which prefill server, or here.

It collects what the decisions depend on: prefill servers, queues, caches, memory and measured rates. The decisions are
pure functions: placement/place.py, placement/choice.py.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from ...common.errors import ClientError, RequestError
from ..chunking.fair_queue import MAX_MISFITS
from ..store.kv_store import KvStore
from .memory.request_memory import Reservation, fits_to_compute, pages_needed, reserve
from .memory.resources import Resources
from .placement.peers import PrefillPeers, Selection
from .placement.place import Placement, PlacementInputs
from .placement.place import place as decide
from .requests.limits import MAX_ATTEMPTS
from .requests.request import Attempt, LocalPrompt, Prompt
from .responses import too_long
from .rooms.queued import Lane, Position
from .rooms.rooms import Rooms

PAIRING_S = 1.0
"""How long a prompt waits for the first prefill server to pair, if this server may compute it."""
ESTIMATE_S = 0.25
"""The cached tokens of a waiting prompt are looked up at most once in this time."""
LOOK_S = 0.05
"""A look at all prompts of prefill servers takes up to a millisecond."""
MAX_SKIPPED = 32
"""Most prompts that a turn may skip within their lanes, because each waits for a prefix or for one server only."""
NEVER, ALWAYS = Placement("remote", "never"), Placement("local", "always")


class Placed(NamedTuple):
    """A prompt to send, and its pages. Without a `selection`, this server computes it."""

    prompt: Prompt
    reservation: Reservation
    selection: Selection | None
    blocked: list[Prompt]
    """Those that come before it, and that find no pages."""


class Placer:
    """Owns no prompts."""

    def __init__(self, resources: Resources, rooms: Rooms, peers: PrefillPeers) -> None:
        self._limits = resources.limits
        self._rates = resources.rates
        self._allocator = resources.allocator
        self._cache = resources.cache
        self._memory = resources.memory
        self._kv_store = resources.kv_store
        self._counters = resources.counters
        self._queued = rooms.queued
        self._computing = rooms.computing
        self._prefilling = rooms.prefilling
        self._peers = peers
        self._first_at: float | None = None
        """When the first prompt was placed."""
        self._look_at = -math.inf
        """When to look for late prompts again."""

    # -- what this server and its prefill servers can do ---------------------------------------------------------

    @property
    def largest_local(self) -> float:
        """Tokens of the longest prompt that this server may and can compute; 0 if it computes none."""
        return self._memory.largest_prompt if self._limits.local_prefill != "never" else 0

    def can_compute(self, prompt: Prompt) -> bool:
        """Whether this server may and can compute a prompt for all its samples."""
        return prompt.tokens <= self.largest_local and fits_to_compute(prompt, self._allocator.num_pages, self._limits)

    def can_prefill(self, endpoint: str | None, tokens: int) -> bool:
        """Whether there is a server that may compute a prompt of `tokens` tokens for this endpoint."""
        return tokens <= self.largest_local or (
            self._limits.local_prefill != "always" and self._peers.absent_since(endpoint) is None
        )

    def largest_prompt(self, endpoint: str | None) -> float:
        """Tokens of the longest prompt that this server or a prefill server can compute; inf while no prefill server is
        paired, because its limit is unknown.
        """
        if self._limits.local_prefill == "always":
            return self.largest_local
        return max(self.largest_local, self._peers.largest_prompt(endpoint))

    def refusal(self, endpoint: str | None, tokens: int, output_tokens: int) -> RequestError | None:
        """The error for a prompt that no server can compute, or whose endpoint stands for several prefill servers. A
        router that gives a name has chosen one of them, but not said which.
        """
        if servers := self._peers.several_at(endpoint):
            return ClientError(
                f"bootstrap_host: {endpoint} stands for {len(servers)} prefill servers: "
                f"name one of {', '.join(servers)}"
            )
        most_tokens = self.largest_prompt(endpoint)
        if tokens <= most_tokens:
            return None
        local = most_tokens == self.largest_local
        return too_long(tokens, output_tokens, most_tokens, local=local, window=self._limits.window)

    def expected_wait_s(self, now: float) -> float:
        """Expected time in the queue of a prompt that arrives now; at most `queue_timeout_s`."""
        return self._queued.pace.wait_s(len(self._queued), now, most_s=self._limits.queue_timeout_s)

    # -- which prompts are sent ----------------------------------------------------------------------------------

    def placed(self, now: float, *, above: int | None = None, keep: int = 0) -> Iterator[Placed]:
        """Yield the prompts that can be sent, in the order of the queue; with `above`, only those of a higher priority.
        `keep` pages stay free. The caller takes each prompt from the queue before it asks for the next one.

        Smaller prompts may overtake one that does not fit, until it is due; then free memory is kept for it. A prompt
        whose prefill server is absent or busy does not delay others.
        """
        blocked: list[Prompt] = []
        busy: set[str | None] = set()
        self._peers.release_held()
        for prompt, placement, selection in self._in_order(busy, now):
            if len(blocked) >= MAX_MISFITS or any(map(self._queued.is_due, blocked)):
                break
            if above is not None and prompt.priority <= above:
                break
            is_local = placement.where == "local"
            if keep and self._allocator.available + self._allocator.lent < keep + self._most_pages(prompt):
                break
            reservation = None
            if not is_local or self._memory.may_compute(prompt, shrink=True):
                most = prompt.most_cached if is_local else prompt.tokens
                reservation = reserve(
                    prompt, self._allocator, self._cache, self._limits, most_cached=most, local=is_local
                )
            if reservation is None:
                blocked.append(prompt)
                continue
            self._counters["overtakes"] += bool(blocked)
            self._counters[f"{placement.where}_prefill_{placement.reason}"] += 1
            assert is_local or selection is not None, f"prompt {prompt.prompt_id} has no prefill server"
            yield Placed(prompt, reservation, None if is_local else selection, blocked)
        self._queued.pace.note(len(self._queued), busy, now)

    def _most_pages(self, prompt: Prompt) -> int:
        """Pages that a prompt needs at dispatch if no part of it is cached."""
        samples, limits = len(prompt.waiting), self._limits
        most_tokens = prompt.tokens + limits.growth_tokens
        return pages_needed(prompt.tokens, samples, most_tokens, limits.page_size, limits.window)

    def _in_order(self, busy: set[str | None], now: float) -> Iterator[tuple[Prompt, Placement, Selection | None]]:
        """The prompts that start now if there is memory, in the order of the queue, and where. A lane whose first
        prompt waits is closed for this turn, so those behind cost no time. Endpoints whose servers take no prompt are
        added to `busy`.
        """
        seen: set[Prompt] = set()
        skipped: set[Prompt] = set()
        closed: set[object] = set()
        while True:
            heads = []
            for key, lane in self._queued.lanes.items():
                if key not in closed:
                    head = self._head(lane, seen, skipped, busy, now)
                    heads += [head] if head is not None else []
                    closed |= {key} if head is None else set()
            if not heads:
                return
            _, prompt, placement, selection = min(heads, key=lambda head: head[0])
            seen.add(prompt)
            yield prompt, placement, selection

    def _head(
        self, lane: Lane, seen: set[Prompt], skipped: set[Prompt], busy: set[str | None], now: float
    ) -> tuple[Position, Prompt, Placement, Selection | None] | None:
        """The first prompt of a lane that starts now. A prompt that waits for a prefix, or for one server, only skips
        its turn, unless MAX_SKIPPED have done so.
        """
        for position, prompt in lane:
            if prompt in seen or prompt in skipped:
                continue
            selection = self._peers.select(prompt, now)
            placement, starts = self._place(prompt, selection, now)
            if starts:
                return position, prompt, placement, selection
            if self.can_prefill(prompt.endpoint, prompt.tokens):
                busy.add(prompt.endpoint)
            if prompt.awaited is None:
                if selection is None or selection.is_open or not selection.cached:
                    return None
                self._peers.hold(prompt, selection)
            if len(skipped) >= MAX_SKIPPED:
                return None
            skipped.add(prompt)
        return None

    def _place(self, prompt: Prompt, selection: Selection | None, now: float) -> tuple[Placement, bool]:
        """Where to compute a prompt, on the selected prefill server or here, and whether to do so now."""
        if self._first_at is None:
            self._first_at = now
        mode, awaited = self._limits.local_prefill, prompt.awaited
        remote_open = selection is not None and selection.is_open
        if mode == "never":
            return NEVER, remote_open
        shared = self._awaited_tokens(prompt, now)
        local_open = not shared and self._computing.is_open(prompt)
        placement = ALWAYS if mode == "always" else decide(self._inputs(prompt, selection, shared, now))
        if placement in (("local", "short"), ("local", "late")) and remote_open and self._rates.transfers.is_old(now):
            self._rates.transfers.measure_again(now)
            placement = Placement("remote", "unmeasured")
        starts = placement.where is not None and (local_open if placement.where == "local" else remote_open)
        if starts:
            prompt.awaited = None
        self._counters["prefix_waits"] += prompt.awaited is not awaited and prompt.awaited is not None
        return placement, starts

    def first_late(self, now: float) -> Prompt | None:
        """The first prompt that its prefill server will bring late, and that this server computes sooner. When there is
        none, the next look is LOOK_S later.
        """
        if self._limits.local_prefill != "auto" or now < self._look_at:
            return None
        for prompt in self._prefilling.prompts.values():
            if (
                prompt.attempt is not None
                and prompt.attempt.done is None
                and self._is_late(prompt, prompt.attempt, now)
            ):
                return prompt
        self._look_at = now + LOOK_S
        return None

    def _is_late(self, prompt: Prompt, attempt: Attempt, now: float) -> bool:
        """Whether a prompt will be late at its prefill server, and not here. If it has taken longer than expected, it
        is expected to take that much longer again.
        """
        remote_s = now - attempt.sent_at - attempt.expected_s
        if remote_s <= max(0.0, self._due_s(prompt, now)):
            return False
        inputs = self._inputs(prompt, None, 0, now)
        return decide(dataclasses.replace(inputs, failed=None, short=False, remote_s=remote_s)) == ("local", "late")

    def _due_s(self, prompt: Prompt, now: float) -> float:
        """The time until the first token of a prompt is late."""
        return prompt.arrived_at + (prompt.slo_ttft_s or self._limits.slo_ttft_s) - now

    def _inputs(self, prompt: Prompt, selection: Selection | None, shared: int, now: float) -> PlacementInputs:
        """The inputs of the decision in mode `auto`. Another prompt computes the next `shared` tokens here."""
        able = self._peers.able(prompt)
        remote_open = selection is not None and selection.is_open
        tokens = prompt.tokens - self._cached_tokens(prompt, now) if able else prompt.tokens
        here = self._computing.tokens_before(tokens) + tokens - shared
        rate = self._local_rate(tokens)
        return PlacementInputs(
            servers="paired" if able else "expected" if self._expects_server(prompt, now) else "absent",
            failed=self._failed(prompt, remote_open=remote_open),
            room=self._room(prompt),
            shared_device=all(peer.shares_device for peer in able),
            short=rate is not None and here <= self._computing.short_tokens(rate),
            due_s=self._due_s(prompt, now),
            remote_s=self._remote_s(prompt, tokens, selection, now),
            local_s=self._computing.expected_s(here, rate) if rate is not None else None,
        )

    def _local_rate(self, tokens: int) -> float | None:
        """Tokens per second of a prompt of `tokens` tokens here. Until such prompts are measured, this server is
        expected to be as fast as prefill servers.
        """
        return self._rates.local_tokens.at(tokens) or self._peers.tokens_per_s or self._rates.prefilled_tokens.per_s

    def _remote_s(self, prompt: Prompt, tokens: int, selection: Selection | None, now: float) -> float | None:
        """The expected time until the KV of a prompt is here from the selected server, or else from the best one, if
        they have to compute `tokens` tokens.
        """
        transfers = self._rates.transfers.per_s
        tokens -= self._shared_at_prefill(prompt, prompt.tokens - tokens)
        if selection is not None:
            peers, tokens = [selection.peer], min(tokens, prompt.tokens - (selection.cached or 0))
        else:
            peers = self._peers.able(prompt)
        if transfers is None or not peers:
            return None
        queued = 0  # tokens that wait here, and are sent before it
        if selection is None or not selection.is_open:
            queued = min(self._queued.tokens, len(self._queued) * tokens) // len(peers)
        known = self._peers.tokens_per_s or self._rates.prefilled_tokens.per_s
        if known is None:
            return None
        return 1 / transfers + min(peer.expected_s(tokens, queued, peer.tokens_per_s or known, now) for peer in peers)

    def _failed(self, prompt: Prompt, *, remote_open: bool) -> Literal["failed", "refused"] | None:
        if prompt.computed_here or prompt.attempts - prompt.times_refused >= MAX_ATTEMPTS:
            return "failed"
        return "refused" if prompt.times_refused >= MAX_ATTEMPTS and not remote_open else None

    def _room(self, prompt: Prompt) -> Literal["now", "later", "never"]:
        memory = self._memory
        if prompt.tokens > memory.largest_prompt or not fits_to_compute(
            prompt, memory.allocator.num_pages, self._limits
        ):
            return "never"
        return "now" if memory.may_compute(prompt, shrink=False) else "later"

    def _shared_at_prefill(self, prompt: Prompt, cached: int) -> int:
        """Tokens of a prompt that prefill servers are computing now for another prompt with the same prefix."""
        found = self._prefilling.prefixes.find(prompt.token_ids, cached, prompt.tokens - 1, prompt.priority)
        return found.end - cached if found is not None else 0

    def _awaited_tokens(self, prompt: Prompt, now: float) -> int:
        """Tokens of a prompt that another prompt is computing on this server, if this one should wait for them."""
        if prompt.awaited is not None:
            if left := prompt.awaited.tokens_left:
                return left
            prompt.awaited = prompt.cached_estimate = None
        if self._computing.prefixes:
            most, cached = prompt.most_cached, self._cached_tokens(prompt, now)
            prompt.awaited = self._computing.prefixes.find(prompt.token_ids, cached, most, prompt.priority)
        return prompt.awaited.tokens_left if prompt.awaited is not None else 0

    def _expects_server(self, prompt: Prompt, now: float) -> bool:
        """Whether the first prefill server at this endpoint, or anywhere, may still pair."""
        if self._peers.absent_since(prompt.endpoint) != -math.inf:
            return False
        since = prompt.waits_since if prompt.endpoint is not None else self._first_at
        return since is not None and now - since < PAIRING_S

    def _cached_tokens(self, prompt: Prompt, now: float) -> int:
        """Tokens of a prompt that this server does not have to compute. The lookup in the prefix cache and the KV store
        takes milliseconds for a long prompt, so its result is kept for ESTIMATE_S.
        """
        if prompt.cached_estimate is None or now - prompt.cached_estimate[0] >= ESTIMATE_S:
            pages = self._cache.match(prompt.token_ids, prompt.most_cached)
            cached = len(pages) * self._limits.page_size
            if self._kv_store is not None:
                prompt.stored_estimate = self._stored_tokens(self._kv_store, prompt, cached)
            prompt.cached_estimate = now, cached + prompt.stored_estimate
        return prompt.cached_estimate[1]

    def _stored_tokens(self, store: KvStore[LocalPrompt], prompt: Prompt, cached: int) -> int:
        """Tokens after the cached ones that the KV store is expected to have. They give neither side an advantage,
        because a prefill server loads them too.
        """
        if prompt.load_failed:
            return 0
        prompt.chain = prompt.chain or store.new_chain()
        return store.expected_tokens(
            prompt.chain,
            prompt.token_ids,
            cached=cached,
            most=prompt.most_cached,
            tokens_per_s=self._rates.local_tokens.per_s,
        )

    def gauges(self) -> dict[str, float]:
        """The measured inputs of the placement. Unknown and infinite values are left out."""
        limit_s = self._computing.gap_limit_s()
        limit = {"token_gap_limit_seconds": limit_s} if math.isfinite(limit_s) else {}
        if self._limits.local_prefill == "never":
            return limit
        transfers = self._rates.transfers.per_s
        rate = self._local_rate(self._limits.max_step_tokens)
        measured = {
            "local_prefill_tokens_per_second": rate,
            "local_prefill_short_tokens": self._computing.short_tokens(rate) if rate is not None else None,
            "remote_prefill_tokens_per_second": self._peers.tokens_per_s or self._rates.prefilled_tokens.per_s,
            "remote_prefill_overhead_seconds": 1 / transfers if transfers is not None else None,
            "decode_step_seconds": self._computing.times.idle_step_s(self._computing.times.running),
        }
        known = {name: value for name, value in measured.items() if value is not None and math.isfinite(value)}
        return {**limit, **known, "local_prefill_waiting_tokens": self._computing.window.own_tokens}
