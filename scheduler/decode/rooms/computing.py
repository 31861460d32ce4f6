"""LOADING and COMPUTING prompts: those that a decode server computes itself, in chunks that are part of its steps."""

import collections
import math
import statistics
from collections.abc import Collection, Iterable, Sequence

from ....common.arithmetic import round_up
from ....common.sampling import TokenLogprob, pack_logprobs
from ....transfer.protocol.messages import Load, PrefillDone, TransferKey
from ...chunking.chunk_queue import Chunk, ChunkQueue
from ...chunking.shared_prefix import PrefixesInProgress
from ...chunking.step_rule import Waiting, gap_limit_s, prompt_time
from ...rates import Rate, RateBySize, Rates
from ..placement.peers import DispatchWindow
from ..requests.limits import DecodeLimits
from ..requests.request import LocalPrompt, Prompt, Request

STEPS_AHEAD = 4
"""Steps of prompt tokens that may wait here. Further prompts wait in the queue, where they hold no pages."""
STEP_ROWS = 128
"""The GPU computes tokens in tiles of this many, and CUDA graphs have such sizes: a few more cost as much as a tile."""
SHORT_PART = 0.2
"""Prompts that lengthen a step by at most this part of it are computed here: nobody notices such a gap."""

REMEASURE_STEPS = 32
"""After this many steps with prompt tokens, one step has none, to measure how long a decode step takes now."""
LEAST_EXTRA = 0.05
"""Prompt tokens take at least this part of a step: measured times vary, and their difference may be negative."""


class Computing:
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
        self.prompts: set[LocalPrompt] = set()
        """Those in the queue are COMPUTING. The others wait for a load from the KV store, or until their cached prefix
        is in their hot buffer.
        """
        self.times = StepTimes(rates.local_tokens)
        self.window = DispatchWindow()
        self.window.report(Load(window_tokens=STEPS_AHEAD * self._most))

    def is_open(self, prompt: Prompt) -> bool:
        """Whether this prompt may be started now."""
        return self.window.is_open(prompt.kind())

    def tokens_before(self, tokens: int) -> int:
        """Tokens of other prompts that are computed before a prompt of `tokens` tokens that arrives now is done. A
        longer prompt counts as `tokens` tokens, because the shorter one is computed beside it.
        """
        return sum(min(local.left, tokens) for local in self.prompts)

    def start(self, prompt: Prompt, cached: int, now: float) -> LocalPrompt:
        """Take a prompt that has its pages; [0, cached) of it were in the prefix cache. Call `loaded` to compute it."""
        assert prompt.grant is not None, f"prompt {prompt.prompt_id} is computed without pages"
        prompt.local = local = LocalPrompt(prompt, prompt.grant.pages, cached, now)
        self.window.sent(local.kind, local.left)
        self.prompts.add(local)
        return local

    def loaded(self, local: LocalPrompt) -> None:
        """The prompt has all that its chunks need."""
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
        local = chunk.owner
        if local.prompt.local is not local:
            return False
        local.compute_s += seconds
        local.computed = chunk.end
        if local.progress is not None:
            self.prefixes.cached(local.progress, chunk.end)
        self.window.computed(local.kind, chunk.end - chunk.start)
        return True

    def finish(self, local: LocalPrompt, first_tokens: tuple[TokenLogprob, ...], now: float) -> PrefillDone:
        """The prompt is computed, with the first token of every sample. Says so as prefill servers do."""
        prompt = local.prompt
        self.remove(prompt)
        return PrefillDone(
            key=TransferKey(prompt.prompt_id, prompt.attempts),
            first_tokens=first_tokens,
            prompt_tokens=prompt.tokens,
            chunks=0,
            writes=0,
            bytes_written=0,
            queue_s=max(0.0, now - local.started_at - local.compute_s),
            compute_s=local.compute_s,
            transfer_tail_s=0.0,
            cached_tokens=local.cached,
            input_logprobs=pack_logprobs(local.input_logprobs),
            stored_tokens=local.stored,
        )

    def remove(self, prompt: Prompt) -> LocalPrompt:
        """The prompt is computed or given up. Its chunks in flight are ignored."""
        local, prompt.local = prompt.local, None
        assert local is not None, f"prompt {prompt.prompt_id} is not computed here"
        self.prompts.remove(local)
        if local in self.queue:
            self.queue.remove(local)
        if local.progress is not None:
            self.prefixes.end(local.progress)
        self.window.returned(local.kind, local.prompt_tokens - local.computed)
        return local


class StepTimes:
    """Measures steps: the time of a decode step, and the rate of prompt tokens beside it or alone."""

    def __init__(self, prompt_tokens: Rate) -> None:
        """`prompt_tokens` gets the measured rate."""
        self._prompt_tokens = prompt_tokens
        self._alone = RateBySize()
        """Prompt tokens in steps without running requests."""
        self._beside: collections.deque[float] = collections.deque(maxlen=3)
        """Prompt tokens per second in the last steps with running requests. Few samples: the rate falls while the
        context of a prompt grows.
        """
        self._decode_steps: collections.defaultdict[int, Rate] = collections.defaultdict(lambda: Rate(samples=3))
        """Steps without prompt tokens per second, by the bit length of the number of running requests. Few samples
        each, because contexts grow.
        """
        self._steps: collections.deque[tuple[float, int, int]] = collections.deque()
        """In flight, oldest first: start, running requests and prompt tokens."""
        self.ended_at = -math.inf
        """When the last step ended."""
        self.running = 0
        """Running requests of a step, also between two steps. The scheduler sets it before it places prompts."""
        self._mixed = 0
        """Steps with prompt tokens since the last one without."""

    def idle_step_s(self, running: int) -> float | None:
        """The time of a step of `running` requests without prompt tokens. If no such step was measured, the time for
        the nearest smaller number of requests, or else for the nearest larger one; None without any measurement.
        """
        size = running.bit_length()
        measured = self._decode_steps.get(size)
        if measured is not None and measured.per_s is not None:
            return 1 / measured.per_s
        for _, rate in sorted(self._decode_steps.items(), key=lambda item: (item[0] > size, abs(item[0] - size))):
            if rate.per_s is not None:
                return 1 / rate.per_s
        return None

    def tokens_per_s(self, most: int) -> float | None:
        """Prompt tokens per second beside running requests, from the last such steps. The result is at most the rate of
        steps that had only prompt tokens, up to `most`: a few tokens beside many requests take hardly any time, so
        their rate does not predict the time of many tokens.
        """
        beside = statistics.median(self._beside) if self._beside else None
        return min((rate for rate in (beside, self._alone.at(most)) if rate is not None), default=None)

    @property
    def in_flight(self) -> int:
        """Steps in flight."""
        return len(self._steps)

    def remeasure(self, running: int) -> bool:
        """Whether the next step, of `running` requests, should have no prompt tokens."""
        return self._mixed >= REMEASURE_STEPS or running.bit_length() not in self._decode_steps

    def started(self, running: int, tokens: int, now: float) -> None:
        """A step with this many running requests and prompt tokens has been sent to the ranks."""
        self._steps.append((now, running, tokens))
        if running:
            self._mixed = self._mixed + 1 if tokens else 0
        if not tokens:
            _ = self._decode_steps[running.bit_length()]  # this step measures it

    def ended(self, now: float) -> float:
        """The oldest step has ended. Returns its time, from its start or from the end of the previous one."""
        started_at, running, tokens = self._steps.popleft()
        seconds = now - max(started_at, self.ended_at)
        self.ended_at = now
        if not tokens:
            self._decode_steps[running.bit_length()].measured(1, seconds)
        elif not running:
            self._prompt_tokens.measured(tokens, seconds)
            self._alone.measured(tokens, seconds)
        elif (idle_s := self.idle_step_s(running)) is not None:
            extra_s = max(LEAST_EXTRA * seconds, seconds - idle_s)
            self._prompt_tokens.measured(tokens, extra_s)
            if extra_s > 0:
                self._beside.append(tokens / extra_s)
        return seconds


def whole_tiles(tokens: int, batch: int, *, most: int, page_size: int) -> int:
    """Prompt tokens of a step of at most `most` rows, beside a batch: at most `tokens`, at least a page. A step
    slightly larger than a multiple of STEP_ROWS is reduced to it.
    """
    rows = min(tokens + batch, most)
    if rows > STEP_ROWS and rows % STEP_ROWS < STEP_ROWS // 2:
        rows -= rows % STEP_ROWS
    return max(page_size, rows - batch)
