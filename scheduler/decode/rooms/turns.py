"""Whose turn it is on a GPU that this server shares with a prefill server.

Two processes on one GPU get about half of it each while both have work, so a prompt would take twice as long beside
decode steps. Instead, while the prefill server computes prompts of this server, the next decode step starts so late
that its tokens come within a part of the limit on gaps. No message is needed: this server knows what it has sent and
what has arrived. On shared CPU cores the operating system divides the time, and short prompts are faster without turns.
"""

import math
from collections.abc import Sequence

from ...chunking.step_rule import gap_limit_s
from ..placement.peers import PrefillPeers
from ..requests.limits import DecodeLimits
from ..requests.request import Request
from .computing import StepTimes

TURN_PART = 0.5
"""The part of the limit on gaps after which the tokens of a step come. The step itself may take longer than measured,
because prefill computes beside it; and a pair is chosen for steady gaps.
"""


class Turns:
    """Decides how long the next decode step waits."""

    def __init__(self, limits: DecodeLimits, peers: PrefillPeers, times: StepTimes) -> None:
        self._limits = limits
        self._peers = peers
        self._times = times

    def pause_s(self, running: Sequence[Request], now: float) -> float:
        """How long the next step of these requests waits; inf if first the step in flight has to end. With pipeline
        stages, steps do not wait.
        """
        auto_s, default_s, times = self._limits.auto_itl_s, self._limits.slo_itl_s, self._times
        if not running or self._limits.stages > 1 or not self._peers.computes_beside(auto_s, now):
            return 0.0
        if times.in_flight:
            return math.inf
        idle_s = times.idle_step_s(len(running))
        if idle_s is None:
            return 0.0
        given = {default_s if request.slo_itl_s is None else request.slo_itl_s for request in running}
        limit_s = min(gap_limit_s(idle_s, each_s or None, auto_s) for each_s in given)  # also without a limit
        return max(0.0, times.ended_at + TURN_PART * limit_s - idle_s - now)
