"""Finds what has stopped making progress: the engine loop, a step on the ranks, the control thread.

It runs on the thread that sends the status, so that the loop does not pay for it. Ranks report their own threads
(`Ranks.problems`).
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from ...common.stuck import STUCK_S, Watch
from ...transfer.control.peers import AnyControl
from ..messages.ranks import RunStep
from ..messages.step import tokens_of
from .engine import Engine
from .loop import EngineLoop

STEP_SLACK = 10.0
"""A step is stuck if it takes longer than STUCK_S and this many times longer, per token, than the slowest step so far.
"""


class Watchdog:
    """Call `problems()` a few times a second, on one thread."""

    def __init__(
        self, loop: EngineLoop[Any], controls: Sequence[AnyControl], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loop = loop
        self._controls = controls
        self._clock = clock
        self._watch = Watch(clock)
        self._seconds_per_token = 0.0
        """Of the slowest step seen so far; 0 before the first step."""
        self._last_steps: dict[int, tuple[RunStep, float]] = {}
        """The last step seen of each engine."""

    def problems(self) -> list[str]:
        """What is stuck, as text."""
        self._watch.check()
        found = []
        age_s = self._clock() - self._loop.turned_at
        if self._watch.is_stuck(age_s):
            found.append(f"the engine loop has made no progress for {age_s:.0f} s")
        for number, engine in enumerate(self._loop.engines):
            if (problem := self._stuck_step(number, engine)) is not None:
                found.append(problem if len(self._loop.engines) == 1 else f"data-parallel rank {number}: {problem}")
        age_s = max(control.progress_age_s() for control in self._controls)
        if self._watch.is_stuck(age_s):
            found.append(f"the control thread has made no progress for {age_s:.0f} s")
        return found

    def _stuck_step(self, number: int, engine: Engine[Any]) -> str | None:
        """Whether the oldest step of an engine is stuck, as text. Steps of many tokens take long, so the time per token
        is compared. A step during which this process was stopped is not measured: it would make the limit so high that
        a stuck step is not noticed for hours.
        """
        if (last := engine.last_step) is not None and last is not self._last_steps.get(number):
            self._last_steps[number] = last
            step, seconds = last
            if self._watch.has_run_for(seconds):
                self._seconds_per_token = max(self._seconds_per_token, seconds / max(1, tokens_of(step.rows).tokens))
        try:
            started, step = engine.steps_in_flight[0]
        except IndexError:  # the loop may take the last one at any time
            return None
        age_s = self._clock() - started
        if age_s <= STUCK_S or not self._seconds_per_token:
            return None
        limit_s = max(STUCK_S, STEP_SLACK * self._seconds_per_token * tokens_of(step.rows).tokens)
        if not self._watch.is_stuck(age_s, limit_s):
            return None
        return f"step {step.command_id} has been on the ranks for {age_s:.0f} s"
