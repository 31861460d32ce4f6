"""Requests that are late for their first token or for a later one, counted by what they waited for."""

import collections
import math

from ..chunking.step_rule import LATE_GAPS
from ..messages.counters import FIRST_TOKEN_STAGES
from .dispatch.local_prefill import LocalPrefill
from .requests.limits import DecodeLimits
from .requests.request import Request


class Lateness:
    """A request counts once for its first token, and once for its first gap that is too long: by more than the tenth
    that the rule for steps allows.
    """

    def __init__(self, limits: DecodeLimits, local: LocalPrefill, counters: collections.Counter[str]) -> None:
        self._slo_ttft_s = limits.slo_ttft_s
        self._local = local
        self._counters = counters
        self._late_s = math.inf
        """A longer time between two tokens is late, for requests without a limit of their own."""
        self._with_prompts: collections.deque[bool] = collections.deque(maxlen=limits.stages + 1)
        """Whether each of the last steps computed prompts. The token of a request takes a step in each stage; a step
        that computes prompts may also be between two that have none.
        """

    def step_ended(self, *, prompts: bool) -> None:
        """A step has ended, whose tokens follow. It computed `prompts` too."""
        self._with_prompts.append(prompts)
        self._late_s = LATE_GAPS * self._local.gap_limit_s()

    def token(self, request: Request, now: float) -> None:
        """The request has its next token."""
        before, request.token_at = request.token_at, now
        if before is None:
            limit_s = request.slo_ttft_s or self._slo_ttft_s
            if now - request.lifecycle.started > limit_s:
                stages = request.timeline(now)
                self._counters["late_first_token_" + max(FIRST_TOKEN_STAGES, key=stages.__getitem__)] += 1
            return
        late_s = self._late_s if request.slo_itl_s is None else LATE_GAPS * request.slo_itl_s
        if now - before > late_s and not request.had_late_gap:
            request.had_late_gap = True
            self._counters["late_gap_" + self._cause_of_gap(request, before, now)] += 1

    def _cause_of_gap(self, request: Request, before: float, now: float) -> str:
        if request.lifecycle.since > before:  # it did not run all the time
            return "retracted" if request.timeline(now)["retracted"] else "admit"
        if request.masked_output == len(request.output_ids) - 1:
            return "grammar"
        return "prompts" if any(self._with_prompts) else "steps"
