"""The steps of a decode server: chooses what the next step computes, and applies the results of a step."""

from collections.abc import Sequence

from ...configs.errors import ServerError
from ..messages.lifecycle import State
from ..messages.ranks import MaskReady
from ..messages.step import StepResult
from .admission import Admission
from .arrivals import Arrivals
from .dispatch.dispatcher import PrefillDispatcher
from .endings import Endings
from .memory.resources import Resources
from .requests.request import Request
from .responses import grammar_failure
from .retraction import Retractions
from .run_queue import DecodeStep, RunQueue


class Steps:
    """Starts and ends steps. A step has a row for each request of its batch, and chunks of prompts that this server
    computes.
    """

    def __init__(
        self,
        resources: Resources,
        *,
        dispatcher: PrefillDispatcher,
        run_queue: RunQueue,
        retracted: Retractions,
        admission: Admission,
        arrivals: Arrivals,
        endings: Endings,
    ) -> None:
        self._memory = resources.memory
        self._counters = resources.counters
        self._dispatcher = dispatcher
        self._run_queue = run_queue
        self._retracted = retracted
        self._admission = admission
        self._arrivals = arrivals
        self._endings = endings
        self._rows_waited = False
        """The last step had only chunks, so the next one has only requests. A step that fetches rows for an evicting
        request cannot compute chunks, so the two kinds of step alternate.
        """

    def next_step(self, now: float) -> DecodeStep | None:
        """The next step, if the ranks take one and there is work for it."""
        if not self._run_queue.may_start_step():
            return None
        for request in self._run_queue.fill_batch():
            request.lifecycle.advance(State.RUNNING, now)
        self._ask_for_masks()
        able: list[Request] = []
        lacking: list[Request] = []
        for request in self._run_queue.next_batch():
            if request.state is State.RUNNING:  # make_room() for another request may have retracted it
                (able if self._retracted.make_room(request, now) else lacking).append(request)
        self._admission.starving = any(request.state is State.RUNNING for request in lacking)
        paused = self._run_queue.paused
        batch = [request for request in able if request.state is State.RUNNING and request is not paused]
        apart = self._memory.fetches(batch)
        rows_next = apart and self._rows_waited
        chunks = []
        if not rows_next:  # without rows, other requests may wait for the end of this step: their rows are in flight
            beside = batch or self._run_queue.continuing
            chunks = self._dispatcher.local.next_chunks(beside, now, apart=apart or not batch)
        self._rows_waited = apart and bool(chunks)
        if self._rows_waited:
            batch = []
        if not batch and not chunks:
            return None
        self._dispatcher.local.times.started(len(batch), sum(chunk.end - chunk.start for chunk in chunks), now)
        return self._run_queue.start_step(batch, self._memory.next_command(), self._memory.hot_slot, chunks)

    def step_done(self, command_id: int, results: Sequence[StepResult], now: float) -> None:
        """Take the sampled token of each row, then the results of chunks. Results of requests that ended during the
        step are dropped.
        """
        step, seconds = self._finish_step(command_id, now)
        self._counters["decode_steps"] += bool(step.rows)
        self._endings.lateness.step_ended(prompts=bool(step.chunks))
        for row, result in zip(step.rows, results, strict=False):
            if row.request.state is not State.RUNNING:
                continue
            if result.problem is None:
                self._endings.accept_token(row.request, result.drawn[0], now)
                if result.slow_mask and row.request.state is State.RUNNING:
                    self._run_queue.slow_masks.add(row.request)
            else:
                self._endings.end(row.request, grammar_failure(result.problem, result.too_complex), now)
        self._ask_for_masks()
        for chunk, result in zip(step.chunks, results[len(step.rows) :], strict=True):
            if result.problem is not None and chunk.prompt in self._dispatcher.local.queue:
                error = grammar_failure(result.problem, result.too_complex)
                self._endings.end_all(chunk.prompt.prompt, error, now)
            self._admission.admit_received(self._arrivals.computed(chunk, result, seconds, now), now)
        if step.chunks:
            self._admission.admit_arrived(now)

    def mask_ready(self, ready: MaskReady, now: float) -> None:
        """A mask is computed: its request takes part in the next step, or ends with the problem."""
        request = self._run_queue.slow_masks.ready(ready.number, slow=ready.slow)
        if request is not None and ready.problem is not None:
            self._endings.end(request, grammar_failure(ready.problem, ready.too_complex), now)

    def _ask_for_masks(self) -> None:
        self._counters["masks_prepared"] += self._run_queue.slow_masks.ask()

    def step_failed(self, command_id: int, reason: str, now: float) -> None:
        """The model could not run this step: its requests fail, the server continues."""
        self._counters["steps_failed"] += 1
        step, _ = self._finish_step(command_id, now)
        for row in step.rows:
            if row.request.state is State.RUNNING:
                self._endings.end(row.request, ServerError(f"the decode step failed: {reason}"), now)
        for prompt in {chunk.prompt.prompt for chunk in step.chunks if chunk.prompt in self._dispatcher.local.queue}:
            self._endings.end_all(prompt, ServerError(f"the step that computed the prompt failed: {reason}"), now)

    def _finish_step(self, command_id: int, now: float) -> tuple[DecodeStep, float]:
        """The step that has ended, and how long it took."""
        step = self._run_queue.finish_step(command_id)
        self._memory.command_done(command_id)
        return step, self._dispatcher.local.times.ended(now)
