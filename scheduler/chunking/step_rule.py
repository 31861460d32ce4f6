"""The rule for steps that compute prompts beside running requests: how long they may take, and which prompt is first.

Every waiting prompt has a deadline for its first token (`due_at`), every running request a limit on the time between
its tokens (`gap_limit_s`). A step takes as many prompt tokens as that limit allows. If first tokens would be late even
so, both cannot hold: then gaps may be LATE_GAPS times as long. In any case prompts get LEAST_SHARE of the time.

Among prompts of the same priority, the earliest deadline comes first. A deadline grows with the compute
time of its prompt, so short prompts do not wait for long ones, and long ones do not wait for all short ones that arrive
later. A prompt that cannot meet its deadline any more counts as a new one with what is left of it, so it makes no other
late; but the longer it is late, the sooner it comes first.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

SLO_TTFT_S = 0.5
"""Default of `slo_ttft_ms`."""
BASE_S = 0.05
COMPUTE_TIMES = 2.5
"""A prompt should have its first token after BASE_S and COMPUTE_TIMES its compute time, if that is within its limit."""
LIMIT_STEPS = 2.5
"""The automatic limit on gaps is at least so many decode steps: models with long steps need more milliseconds."""
LATE_GAPS = 1.1
LEAST_SHARE = 0.3


class PromptTime(NamedTuple):
    """How long prompts may take in the next step, and whether first tokens would be late without longer gaps."""

    seconds: float
    late: bool


class Waiting(NamedTuple):
    """A waiting prompt: the time until its first token is due, and the time to compute the rest of it."""

    due_s: float
    compute_s: float


def due_at(
    arrived_at: float,
    now: float,
    compute_s: float,
    left_s: float,
    slo_ttft_s: float,
    *,
    own_s: float | None = None,
) -> float:
    """When the first token of a prompt is due that takes `compute_s`, of which `left_s` are left. `own_s` is the limit
    of its request, if it has one.
    """
    first = arrived_at + (own_s or min(slo_ttft_s, BASE_S + COMPUTE_TIMES * compute_s))
    if now + left_s <= first:
        return first
    late_s = max(0.0, now - first)
    return now + min(slo_ttft_s, BASE_S + COMPUTE_TIMES * left_s) / (1 + late_s / slo_ttft_s)


def gap_limit_s(idle_step_s: float, slo_itl_s: float | None, auto_s: float) -> float:
    """The limit on the time between tokens: `slo_itl_s` if it is given, 0 is no limit. Otherwise `auto_s`, or
    LIMIT_STEPS decode steps if they take longer.
    """
    if slo_itl_s is None:
        return max(auto_s, LIMIT_STEPS * idle_step_s)
    return slo_itl_s or math.inf


def prompt_time(idle_step_s: float, limit_s: float, waiting: Iterable[Waiting]) -> PromptTime:
    """Time that prompts may add to a decode step of `idle_step_s`. `waiting` are the prompts in their order."""
    least_s = LEAST_SHARE / (1 - LEAST_SHARE) * idle_step_s
    seconds = max(limit_s - idle_step_s, least_s)
    if seconds == math.inf:
        return PromptTime(seconds, late=False)
    share, work_s = seconds / (idle_step_s + seconds), 0.0
    for prompt in waiting:
        work_s += prompt.compute_s
        if work_s > share * prompt.due_s:
            return PromptTime(max(LATE_GAPS * limit_s - idle_step_s, least_s), late=True)
    return PromptTime(seconds, late=False)
