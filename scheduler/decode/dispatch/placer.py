"""Collects what the placement of a prompt depends on: prefill servers, queues, caches and measured rates."""

import math

from ...chunking.shared_prefix import PrefixesInProgress
from ...store.kv_store import KvStore
from ..memory.resources import Resources
from ..requests.limits import MAX_ATTEMPTS
from ..requests.request import Attempt, LocalPrompt, Prompt
from ..requests.reservation import fits_to_compute
from .local_prefill import LocalPrefill
from .placement import Costs, Placement, PlacementInputs
from .placement import place as decide
from .prefill_peers import PrefillPeers
from .prompt_queue import PromptQueue

PAIRING_S = 1.0
"""How long a prompt waits for the first prefill server to pair, if this server may compute it."""
ESTIMATE_S = 0.25
"""The cached tokens of a waiting prompt are looked up at most once in this time."""
NO_COSTS = Costs(None, None, None)


class Placer:
    """Places prompts; the decision itself is in placement.py."""

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

    def costs(self, tokens: int, shared: int = 0) -> Costs:
        """The measured costs of both places for a prompt of `tokens` tokens, of which another prompt computes `shared`
        here. A place without a measurement for such prompts is expected to have the highest known rate.
        """
        transfers, rates = self._rates.transfers.per_s, (self._rates.prefilled_tokens, self._rates.local_tokens)
        remote, local = (rate.at(tokens) for rate in rates)
        known = (self._peers.tokens_per_s, remote, local, *(rate.per_s for rate in rates))
        expected = max((rate for rate in known if rate), default=None)
        before = self._local.tokens_before(tokens) + tokens - shared
        step_s, local = self._local.expected_speed(before, local or expected)
        return Costs(
            local_tokens_per_s=local,
            remote_tokens_per_s=remote or expected,
            overhead_s=1 / transfers if transfers is not None else None,
            step_s=step_s,
        )

    def gauges(self) -> dict[str, float]:
        """The measured inputs of the placement. Unknown values and an infinite crossover are left out."""
        limit_s = self._local.gap_limit_s()
        limit = {"token_gap_limit_seconds": limit_s} if math.isfinite(limit_s) else {}
        if self._limits.local_prefill == "never":
            return limit
        costs = self.costs(self._limits.max_step_tokens)
        measured = {
            "local_prefill_tokens_per_second": costs.local_tokens_per_s,
            "remote_prefill_tokens_per_second": costs.remote_tokens_per_s,
            "remote_prefill_overhead_seconds": costs.overhead_s,
            "local_prefill_crossover_tokens": costs.crossover_tokens,
            "decode_step_seconds": self._local.times.idle_step_s(self._local.times.running),
        }
        known = {name: value for name, value in measured.items() if value is not None and math.isfinite(value)}
        return {**limit, **known, "local_prefill_waiting_tokens": self._local.window.own_tokens}

    def place(self, prompt: Prompt, now: float, *, remote_open: bool) -> Placement:
        """Where to compute a prompt now; `remote_open`: its prefill server takes it."""
        if self._first_at is None:
            self._first_at = now
        mode, awaited = self._limits.local_prefill, prompt.awaited
        if mode == "never":
            return decide(PlacementInputs(mode, 0, NO_COSTS, remote_open=remote_open))
        shared = self._awaited_tokens(prompt, now)
        local_open = not shared and self._local.is_open(prompt)
        if mode == "always":
            placement = decide(PlacementInputs(mode, 0, NO_COSTS, local_open=local_open))
        else:
            placement = decide(self._inputs(prompt, now, shared, local_open=local_open, remote_open=remote_open))
            if placement == ("local", "short") and remote_open and self._rates.transfers.is_old(now):
                self._rates.transfers.measure_again(now)
                placement = Placement("remote", "unmeasured")
        if placement.where != "wait":
            prompt.awaited = None
        self._counters["prefix_waits"] += prompt.awaited is not awaited and prompt.awaited is not None
        return placement

    def _inputs(
        self, prompt: Prompt, now: float, shared: int, *, local_open: bool, remote_open: bool
    ) -> PlacementInputs:
        """The inputs of the decision in mode `auto`. Another prompt computes the next `shared` tokens here."""
        able = self._peers.able(prompt)
        tokens = prompt.tokens - self._cached_tokens(prompt, now) if able else prompt.tokens
        ahead = min((peer.window.tokens_before(tokens) for peer in able), default=0)
        if able and not remote_open:  # it also waits behind the queue
            ahead += min(self._queue.tokens, len(self._queue) * tokens) // len(able)
        return PlacementInputs(
            "auto",
            tokens,
            self.costs(tokens, shared),
            paired=bool(able),
            expected=self._expects_server(prompt, now),
            failed=prompt.computed_here or prompt.attempts - prompt.times_refused >= MAX_ATTEMPTS,
            refused=prompt.times_refused >= MAX_ATTEMPTS,
            shared_cpu=all(peer.shares_cpu for peer in able),
            remote_open=remote_open,
            remote_ahead=ahead,
            remote_shared=self._shared_at_prefill(prompt, prompt.tokens - tokens),
            local_open=local_open,
            local_ahead=self._local.tokens_before(tokens),
            local_shared=shared,
            local_fits=prompt.tokens <= self._memory.largest_prompt
            and fits_to_compute(prompt, self._memory.pages.num_pages, self._limits),
            local_room=self._memory.may_compute(prompt, shrink=False),
        )

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
