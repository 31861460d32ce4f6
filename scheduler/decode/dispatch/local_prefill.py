"""Prompts that a decode server computes itself, in chunks that are part of its decode steps."""

import collections
import math
from collections.abc import Collection, Iterable, Sequence

from ....common.arithmetic import round_up
from ....transfer.protocol.messages import Load
from ...chunking.chunk_queue import Chunk, ChunkQueue
from ...chunking.shared_prefix import PrefixesInProgress
from ...chunking.step_rule import Waiting, gap_limit_s, prompt_time
from ...rates import Rates
from ..requests.dispatch_window import DispatchWindow, PromptKind
from ..requests.limits import DecodeLimits
from ..requests.request import LocalPrompt, Prompt, Request
from .step_budget import StepTimes

STEPS_AHEAD = 4
"""Steps of prompt tokens that may wait here. Further prompts wait in the queue, where they hold no pages."""
STEP_ROWS = 128
"""The GPU computes tokens in tiles of this many, and CUDA graphs have such sizes: a few more cost as much as a tile."""
SHORT_PART = 0.2
"""Prompts that lengthen a step by at most this part of it are computed here: nobody notices such a gap."""


class LocalPrefill:
    """The LOADING prompts and the queue of COMPUTING ones. Like a prefill server, it has a window that bounds it."""

    def __init__(self, limits: DecodeLimits, rates: Rates, counters: collections.Counter[str]) -> None:
        self._limits = limits
        self._counters = counters
        self._rates = rates
        self._most = round_up(limits.max_step_tokens, limits.page_size)
        self.queue: ChunkQueue[LocalPrompt] = ChunkQueue(limits.page_size, limits.slo_ttft_s)
        # with HiSparse, computed pages enter the prefix cache late, when their rows are in host memory
        shares_prefixes = limits.prefix_cache and not limits.hisparse
        self.prefixes = PrefixesInProgress(limits.page_size, self._most, enabled=shares_prefixes)
        self.loading: set[LocalPrompt] = set()
        """Prompts that wait for a load from the KV store, or until their cached prefix is in their hot buffer."""
        self.times = StepTimes(rates.local_tokens)
        self.window = DispatchWindow()
        self.window.report(Load(window_tokens=STEPS_AHEAD * self._most))

    def is_open(self, prompt: Prompt) -> bool:
        """Whether this prompt may be started now."""
        return self.window.is_open(PromptKind.of(prompt.priority, prompt.tokens))

    def tokens_before(self, tokens: int) -> int:
        """Tokens of other prompts that are computed before a prompt of `tokens` tokens that arrives now is done. A
        longer prompt counts as `tokens` tokens, because the shorter one is computed beside it.
        """
        return sum(min(local.left, tokens) for local in (*self.queue, *self.loading))

    def start(self, prompt: Prompt, cached: int, now: float) -> LocalPrompt:
        """Take a prompt that has its pages; [0, cached) of it were in the prefix cache. Call `loaded` to compute it."""
        assert prompt.grant is not None, f"prompt {prompt.prompt_id} is computed without pages"
        prompt.local = local = LocalPrompt(prompt, prompt.grant.pages, cached, now)
        self.window.sent(local.kind, local.left)
        self.loading.add(local)
        return local

    def loaded(self, local: LocalPrompt) -> None:
        """The prompt has all that its chunks need."""
        self.loading.remove(local)
        self.queue.add(local)
        local.progress = self.prefixes.start(local.prompt.token_ids, local.computed, local.priority)

    def stored(self, local: LocalPrompt, tokens: int) -> None:
        """The first `tokens` tokens of a prompt that is not `loaded` yet are in its pages, from the KV store."""
        local.stored = tokens - local.cached
        local.cached = local.scheduled = local.computed = tokens
        self.window.computed(local.kind, local.stored)

    def next_chunks(self, requests: Sequence[Request], now: float, *, apart: bool) -> list[Chunk[LocalPrompt]]:
        """The chunks of the next step, beside these running requests. They are in the same step or, with `apart`, in
        the steps before and after it.
        """
        batch = len(requests)
        if not self.queue.waiting or (batch and not apart and self.times.remeasure(batch)):
            return []
        rate = self._tokens_per_s
        idle_s = self.times.idle_step_s(batch) if batch else None
        own = {request.slo_itl_s for request in requests}

        def budget(waiting: Iterable[Waiting]) -> int:
            tokens = self._most_tokens(idle_s, rate, waiting, own)
            return whole_tiles(tokens, 0 if apart else batch, most=self._most, page_size=self._limits.page_size)

        return self.queue.next_chunks(budget, now, rate, idle_s or 0.0)

    def _most_tokens(
        self, idle_s: float | None, rate: float | None, waiting: Iterable[Waiting], own: Collection[float | None]
    ) -> int:
        """Most prompt tokens of a step beside running requests, which alone take `idle_s`; None if there are none, or
        if that is not measured. `own` are the requests' own limits on gaps.
        """
        if idle_s is None:
            return self._most
        limit_s = min(self._gap_limit_s(idle_s, own_s) for own_s in own)
        prompts_s, late = prompt_time(idle_s, limit_s, waiting)
        self._counters["late_steps"] += late
        if prompts_s == math.inf:
            return self._most
        return min(self._most, int(prompts_s * rate)) if rate is not None else self._limits.page_size

    def _gap_limit_s(self, idle_s: float, own_s: float | None = None) -> float:
        """The limit on a step, for requests with this limit of their own. A token takes a step in each stage."""
        limits, given = self._limits, self._limits.slo_itl_s if own_s is None else own_s
        return gap_limit_s(idle_s, given and given / limits.stages, limits.auto_itl_s / limits.stages)

    def gap_limit_s(self) -> float:
        """The limit on the time between tokens of the running requests that have none of their own."""
        return self._limits.stages * self._gap_limit_s(self.times.idle_step_s(self.times.running) or 0.0)

    @property
    def _tokens_per_s(self) -> float | None:
        return self.times.tokens_per_s(self._most) or self._rates.prefilled_tokens.per_s

    def short_tokens(self, rate: float) -> int:
        """Most tokens, at `rate` tokens per second, whose step is hardly longer than a decode step: by SHORT_PART of
        it. While no request runs, they have the whole step.
        """
        running = self.times.running
        idle_s = self.times.idle_step_s(running) or 0.0
        return int(min((SHORT_PART + (not running)) * idle_s * rate, self._most))

    def expected_s(self, tokens: int, rate: float) -> float:
        """The expected time until this server has computed `tokens` tokens, those before a prompt included; `rate` is
        its rate without other work. It computes them beside running requests, whose steps take their share.
        """
        running = self.times.running
        idle_s = self.times.idle_step_s(running)
        if not idle_s or (not running and tokens <= self._most):
            return tokens / rate
        prompt_s = min(prompt_time(idle_s, self._gap_limit_s(idle_s), ()).seconds, self._most / rate)
        # with pipeline stages, the chunk leaves the last stage after as many step times as there are steps in flight
        further = max(0, min(self._limits.stages, self.times.in_flight) - 1)
        return idle_s + further * (idle_s + prompt_s) + tokens / rate * (idle_s + prompt_s) / prompt_s

    def computed(self, chunk: Chunk[LocalPrompt], seconds: float) -> bool:
        """A step has computed this chunk. Returns whether a request still needs the prompt; then the caller adds the
        chunk to the prefix cache.
        """
        local = chunk.prompt
        if local.prompt.local is not local:
            return False
        local.compute_s += seconds
        local.computed = chunk.end
        if local.progress is not None:
            self.prefixes.advance(local.progress, chunk.end)
        self.window.computed(local.kind, chunk.end - chunk.start)
        return True

    def remove(self, prompt: Prompt) -> LocalPrompt:
        """The prompt is computed or given up. Its chunks in flight are ignored."""
        local, prompt.local = prompt.local, None
        assert local is not None, f"prompt {prompt.prompt_id} is not computed here"
        if local in self.loading:
            self.loading.remove(local)
        else:
            self.queue.remove(local)
        if local.progress is not None:
            self.prefixes.end(local.progress)
        self.window.returned(local.kind, local.prompt_tokens - local.computed)
        return local


def whole_tiles(tokens: int, batch: int, *, most: int, page_size: int) -> int:
    """Prompt tokens of a step of at most `most` rows, beside a batch: at most `tokens`, at least a page. A step
    slightly larger than a multiple of STEP_ROWS is reduced to it.
    """
    rows = min(tokens + batch, most)
    if rows > STEP_ROWS and rows % STEP_ROWS < STEP_ROWS // 2:
        rows -= rows % STEP_ROWS
    return max(page_size, rows - batch)
