"""Measures the steps of a decode server that computes prompts: how long a decode step takes, and its prompt tokens."""

import collections
import math
import statistics

from ...rates import Rate, RateBySize

REMEASURE_STEPS = 32
"""After this many steps with prompt tokens, one step has none, to measure how long a decode step takes now."""
LEAST_EXTRA = 0.05
"""Prompt tokens take at least this part of a step: measured times vary, and their difference may be negative."""


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
