"""Collects what the placement of a prompt depends on: prefill servers, queues, caches and measured rates."""

import dataclasses
import math
from typing import Literal

from ...chunking.shared_prefix import PrefixesInProgress
from ...store.kv_store import KvStore
from ..memory.reservation import fits_to_compute
from ..memory.resources import Resources
from ..placement.peers import PrefillPeers, Selection
from ..placement.place import Placement, PlacementInputs
from ..placement.place import place as decide
from ..requests.limits import MAX_ATTEMPTS
from ..requests.request import Attempt, LocalPrompt, Prompt
from .computing import LocalPrefill
from .waiting import PromptQueue

PAIRING_S = 1.0
"""How long a prompt waits for the first prefill server to pair, if this server may compute it."""
ESTIMATE_S = 0.25
"""The cached tokens of a waiting prompt are looked up at most once in this time."""


class Placer:
    """Places prompts; the decision itself is in placement/place.py."""

    def __init__(self, resources: Resources, *, queue: PromptQueue, peers: PrefillPeers, local: LocalPrefill) -> None:
        self._limits = limits = resources.limits
        self._rates = resources.rates
        self._cache = resources.cache
        self._memory = resources.memory
        self._kv_store = resources.kv_store
        self._counters = resources.counters
        self._queue = queue
        self._peers = peers
        self._local = local
        self._at_prefill = PrefixesInProgress(limits.page_size, limits.max_step_tokens, enabled=limits.prefix_cache)
        """Prompts that were sent to prefill servers. Those compute a shared prefix once, too."""
        self._first_at: float | None = None
        """When the first prompt was placed."""

    def gauges(self) -> dict[str, float]:
        """The measured inputs of the placement. Unknown and infinite values are left out."""
        limit_s = self._local.gap_limit_s()
        limit = {"token_gap_limit_seconds": limit_s} if math.isfinite(limit_s) else {}
        if self._limits.local_prefill == "never":
            return limit
        transfers = self._rates.transfers.per_s
        rate = self._local_rate(self._limits.max_step_tokens)
        measured = {
            "local_prefill_tokens_per_second": rate,
            "local_prefill_short_tokens": self._local.short_tokens(rate) if rate is not None else None,
            "remote_prefill_tokens_per_second": self._peers.tokens_per_s or self._rates.prefilled_tokens.per_s,
            "remote_prefill_overhead_seconds": 1 / transfers if transfers is not None else None,
            "decode_step_seconds": self._local.times.idle_step_s(self._local.times.running),
        }
        known = {name: value for name, value in measured.items() if value is not None and math.isfinite(value)}
        return {**limit, **known, "local_prefill_waiting_tokens": self._local.window.own_tokens}

    def place(self, prompt: Prompt, selection: Selection | None, now: float) -> tuple[Placement, bool]:
        """Where to compute a prompt, on the selected prefill server or here, and whether to do so now."""
        if self._first_at is None:
            self._first_at = now
        mode, awaited = self._limits.local_prefill, prompt.awaited
        remote_open = selection is not None and selection.is_open
        if mode == "never":
            return decide(PlacementInputs(mode)), remote_open
        shared = self._awaited_tokens(prompt, now)
        local_open = not shared and self._local.is_open(prompt)
        placement = decide(PlacementInputs(mode) if mode == "always" else self._inputs(prompt, selection, shared, now))
        if placement in (("local", "short"), ("local", "late")) and remote_open and self._rates.transfers.is_old(now):
            self._rates.transfers.measure_again(now)
            placement = Placement("remote", "unmeasured")
        starts = placement.where is not None and (local_open if placement.where == "local" else remote_open)
        if starts:
            prompt.awaited = None
        self._counters["prefix_waits"] += prompt.awaited is not awaited and prompt.awaited is not None
        return placement, starts

    def is_late(self, prompt: Prompt, attempt: Attempt, now: float) -> bool:
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
        here = self._local.tokens_before(tokens) + tokens - shared
        rate = self._local_rate(tokens)
        return PlacementInputs(
            "auto",
            servers="paired" if able else "expected" if self._expects_server(prompt, now) else "absent",
            failed=self._failed(prompt, remote_open=remote_open),
            room=self._room(prompt),
            shared_device=all(peer.shares_device for peer in able),
            short=rate is not None and here <= self._local.short_tokens(rate),
            due_s=self._due_s(prompt, now),
            remote_s=self._remote_s(prompt, tokens, selection, now),
            local_s=self._local.expected_s(here, rate) if rate is not None else None,
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
            queued = min(self._queue.tokens, len(self._queue) * tokens) // len(peers)
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
        if prompt.tokens > memory.largest_prompt or not fits_to_compute(prompt, memory.pages.num_pages, self._limits):
            return "never"
        return "now" if memory.may_compute(prompt, shrink=False) else "later"

    def sent(self, prompt: Prompt, attempt: Attempt) -> None:
        """A prompt was sent to a prefill server. Call `returned` for it."""
        if self._limits.local_prefill == "auto":
            cached = attempt.prefix_tokens // self._limits.page_size * self._limits.page_size
            attempt.progress = self._at_prefill.start(prompt.token_ids, cached, prompt.priority)

    def returned(self, attempt: Attempt) -> None:
        """The prompt has arrived, or was given up."""
        if attempt.progress is not None:
            self._at_prefill.end(attempt.progress)

    def _shared_at_prefill(self, prompt: Prompt, cached: int) -> int:
        """Tokens of a prompt that prefill servers are computing now for another prompt with the same prefix."""
        found = self._at_prefill.find(prompt.token_ids, cached, prompt.tokens - 1, prompt.priority)
        return found.end - cached if found is not None else 0

    def _awaited_tokens(self, prompt: Prompt, now: float) -> int:
        """Tokens of a prompt that another prompt is computing on this server, if this one should wait for them."""
        if prompt.awaited is not None:
            if left := prompt.awaited.tokens_left:
                return left
            prompt.awaited = prompt.cached_estimate = None
        if self._local.prefixes:
            most, cached = most_cached(prompt), self._cached_tokens(prompt, now)
            prompt.awaited = self._local.prefixes.find(prompt.token_ids, cached, most, prompt.priority)
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
            pages = self._cache.match(prompt.token_ids, most_cached(prompt))
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
            most=most_cached(prompt),
            tokens_per_s=self._rates.local_tokens.per_s,
        )


def most_cached(prompt: Prompt) -> int:
    """Most tokens that may come from the cache if this server computes the prompt. The last token is always computed,
    because its logits give the first output token. A log-probability of a prompt token needs the logits of the token
    before it.
    """
    logprobs = prompt.waiting[0].logprobs
    if logprobs is not None and logprobs.start is not None and not prompt.output_tokens:
        return min(prompt.tokens - 1, max(0, logprobs.start - 1))
    return prompt.tokens - 1
