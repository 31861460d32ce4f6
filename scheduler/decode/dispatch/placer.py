"""Collects what the placement of a prompt depends on: prefill servers, queues, caches and measured rates."""

import math

from ....memory.prefix_cache import PrefixCache
from ...rates import Rates
from ...store.kv_store import KvStore
from ..memory.request_memory import RequestMemory
from ..requests.limits import MAX_ATTEMPTS, DecodeLimits
from ..requests.request import LocalPrompt, Prompt
from .local_prefill import LocalPrefill
from .placement import Costs, Placement, PlacementInputs
from .placement import place as decide
from .prefill_peers import PrefillPeers
from .prompt_queue import PromptQueue

PAIRING_S = 1.0
"""How long a prompt waits for the first prefill server to pair, if this server may compute it."""
ESTIMATE_S = 0.25
"""How long the number of cached tokens of a waiting prompt is not counted again."""
NO_COSTS = Costs(None, None, None)


class Placer:
    """Places prompts; the decision itself is in placement.py."""

    def __init__(
        self,
        limits: DecodeLimits,
        *,
        queue: PromptQueue,
        peers: PrefillPeers,
        local: LocalPrefill,
        rates: Rates,
        cache: PrefixCache,
        memory: RequestMemory,
        kv_store: KvStore[LocalPrompt] | None = None,
    ) -> None:
        self._limits = limits
        self._queue = queue
        self._peers = peers
        self._local = local
        self._rates = rates
        self._cache = cache
        self._memory = memory
        self._kv_store = kv_store
        self._first_at: float | None = None
        """When the first prompt was placed."""

    def costs(self, tokens: int) -> Costs:
        """The measured costs of both places for a prompt of `tokens` tokens. A place that has not computed such prompts
        is expected to be as fast as the other one.
        """
        transfers, rates = self._rates.transfers.per_s, (self._rates.prefilled_tokens, self._rates.local_tokens)
        remote, local = (rate.at(tokens) for rate in rates)
        known = (self._peers.tokens_per_s, remote, local, *(rate.per_s for rate in rates))
        expected = max((rate for rate in known if rate), default=None)
        ahead = self._local.tokens_before(tokens)
        step_s, local = self._local.expected_speed(tokens + ahead, local or expected)
        return Costs(
            local_tokens_per_s=local,
            remote_tokens_per_s=remote or expected,
            overhead_s=1 / transfers if transfers is not None else None,
            step_s=step_s,
        )

    def gauges(self) -> dict[str, float]:
        """What the placement of prompts is decided by, as far as it was measured. An infinite crossover is left out."""
        if self._limits.local_prefill == "never":
            return {}
        costs = self.costs(self._limits.max_step_tokens)
        measured = {
            "local_prefill_tokens_per_second": costs.local_tokens_per_s,
            "remote_prefill_tokens_per_second": costs.remote_tokens_per_s,
            "remote_prefill_overhead_seconds": costs.overhead_s,
            "local_prefill_crossover_tokens": costs.crossover_tokens,
            "decode_step_seconds": self._local.times.idle_step_s(self._local.times.running),
        }
        known = {name: value for name, value in measured.items() if value is not None and math.isfinite(value)}
        return {**known, "local_prefill_waiting_tokens": self._local.window.own_tokens}

    def place(self, prompt: Prompt, now: float, *, remote_open: bool) -> Placement:
        """Where to compute a prompt now; `remote_open`: its prefill server takes it."""
        if self._first_at is None:
            self._first_at = now
        mode = self._limits.local_prefill
        if mode != "auto":
            remote_open = mode == "never" and remote_open
            local_open = mode == "always" and self._local.is_open(prompt)
            return decide(PlacementInputs(mode, 0, NO_COSTS, remote_open=remote_open, local_open=local_open))
        able = self._peers.able(prompt)
        tokens = prompt.tokens - self._cached_tokens(prompt, now) if able else prompt.tokens
        ahead = min((peer.window.tokens_before(tokens) for peer in able), default=0)
        if able and not remote_open:  # it also waits behind the queue
            ahead += min(self._queue.tokens, len(self._queue) * tokens) // len(able)
        return decide(
            PlacementInputs(
                mode,
                tokens,
                self.costs(tokens),
                paired=bool(able),
                expected=self._expects_server(prompt, now),
                failed=prompt.attempts - prompt.times_refused >= MAX_ATTEMPTS,
                refused=prompt.times_refused >= MAX_ATTEMPTS,
                remote_open=remote_open,
                remote_ahead=ahead,
                local_open=self._local.is_open(prompt),
                local_ahead=self._local.tokens_before(tokens),
                local_fits=prompt.tokens <= self._memory.largest_prompt,
                local_room=self._memory.may_compute(prompt, shrink=False),
            )
        )

    def _expects_server(self, prompt: Prompt, now: float) -> bool:
        """Whether the first prefill server at this endpoint, or anywhere, may still pair."""
        if self._peers.absent_since(prompt.endpoint) != -math.inf:
            return False
        since = prompt.waits_since if prompt.endpoint is not None else self._first_at
        return since is not None and now - since < PAIRING_S

    def _cached_tokens(self, prompt: Prompt, now: float) -> int:
        """Tokens of a prompt that need not be computed here. Compared with the cache and the KV store a few times a
        second only: that takes milliseconds for a long prompt.
        """
        if prompt.cached_estimate is None or now - prompt.cached_estimate[0] >= ESTIMATE_S:
            pages = self._cache.match(prompt.token_ids, most_cached(prompt))
            cached = len(pages) * self._limits.page_size
            if self._kv_store is not None:
                prompt.stored_estimate = self._stored_tokens(self._kv_store, prompt, cached)
            prompt.cached_estimate = now, cached + prompt.stored_estimate
        return prompt.cached_estimate[1]

    def _stored_tokens(self, store: KvStore[LocalPrompt], prompt: Prompt, cached: int) -> int:
        """Tokens behind the cached ones that the KV store is expected to have. A prefill server loads them too."""
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
    """Tokens that may come from the cache if this server computes the prompt: the last one has to be computed, and
    log-probabilities of the prompt need the logits of the token before.
    """
    logprobs = prompt.waiting[0].logprobs
    if logprobs is not None and logprobs.start is not None and not prompt.output_tokens:
        return min(prompt.tokens - 1, max(0, logprobs.start - 1))
    return prompt.tokens - 1
