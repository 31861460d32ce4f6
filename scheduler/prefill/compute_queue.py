"""COMPUTING requests: chooses the slices of the next step, tracks the steps in flight, and measures their rate."""

import collections
import itertools
from collections.abc import Iterable, Iterator

from ..rates import Rate
from .fair_queue import FairQueue
from .limits import PrefillLimits
from .request import PrefillRequest, PrefillRow, PrefillStep


class ComputeQueue:
    """The queue of COMPUTING requests, and the steps that they are in.

    A step is for the highest priority. Half of it goes to the oldest request of that priority, so no request needs more
    than twice the steps of first come, first served. The other half goes to the requests with the fewest tokens left,
    so a short prompt does not wait behind long ones. What they leave goes to the next requests in the queue; but if a
    short prompt ends in the step, only to other prompts that end in it, so that the step is shorter.
    """

    def __init__(self, limits: PrefillLimits) -> None:
        self._limits = limits
        self._queue = FairQueue()
        """Requests with tokens that are in no step yet."""
        self._fully_scheduled: set[PrefillRequest] = set()
        """Requests whose remaining tokens are all in steps in flight."""
        self._steps: collections.deque[tuple[PrefillStep, float]] = collections.deque()
        """In flight, oldest first, with the time of their start."""
        self._ended_at: collections.deque[float] = collections.deque(maxlen=limits.stages)
        """When the last steps ended; as many as the pipeline has stages."""
        self._owed = 0
        """Tokens that earlier steps owe to the oldest request: its half may be less than a page."""
        self._commands = 0
        self.rate = Rate()
        """Tokens per second, while there is something to compute."""

    def __len__(self) -> int:
        return len(self._queue) + len(self._fully_scheduled)

    def __iter__(self) -> Iterator[PrefillRequest]:
        return itertools.chain(self._queue, self._fully_scheduled)

    @property
    def steps(self) -> int:
        """Steps in flight."""
        return len(self._steps)

    @property
    def running(self) -> set[PrefillRequest]:
        """Requests in steps in flight. The others wait."""
        return {row.request for step, _ in self._steps for row in step.rows}

    def computing_for(self, seconds: float, now: float) -> list[PrefillRequest]:
        """The requests of the oldest step in flight, if it started at least `seconds` ago."""
        if not self._steps or now - self._steps[0][1] < seconds:
            return []
        return [row.request for row in self._steps[0][0].rows]

    def add(self, request: PrefillRequest) -> None:
        """Add a request that has its pages."""
        self._queue.push(request)

    def remove(self, request: PrefillRequest) -> None:
        """Remove a request that is computed or has ended. Its rows in steps in flight are ignored."""
        if request in self._queue:
            self._queue.remove(request)
        else:
            self._fully_scheduled.remove(request)

    def next_step(self, now: float) -> PrefillStep | None:
        """The next step, of at most `chunk_size` tokens; None if there is nothing to compute, or enough steps are in
        flight.
        """
        if len(self._steps) >= self._limits.steps_in_flight or not len(self._queue):
            return None
        ends = self._divide_step()
        rows = [_row(request, end) for request, end in ends.items()]
        leading = rows[0].request.priority
        self._queue.turn({row.request for row in rows if row.request.priority == leading})
        for row in rows:
            row.request.scheduled = row.end
            if row.last:
                self._queue.remove(row.request)
                self._fully_scheduled.add(row.request)
        self._commands += 1
        step = PrefillStep(self._commands, rows)
        self._steps.append((step, now))
        return step

    def take(self, command_id: int, now: float) -> list[PrefillRow]:
        """The rows of a step that has ended. Its compute time counts from its start, or from when the pipeline was free
        for it.
        """
        step, started_at = self._steps.popleft()
        assert step.command_id == command_id, f"step {command_id} has ended before step {step.command_id}"
        entered_at = self._ended_at[0] if len(self._ended_at) == self._limits.stages else started_at
        last_ended_at = self._ended_at[-1] if self._ended_at else started_at
        self._ended_at.append(now)
        for request in {row.request for row in step.rows}:
            request.compute_s += now - max(started_at, entered_at, request.computed_at)
            request.computed_at = now
        self.rate.measured(sum(row.end - row.start for row in step.rows), now - max(started_at, last_ended_at))
        return step.rows

    def _divide_step(self) -> dict[PrefillRequest, int]:
        """The token up to which each request is computed in the next step; the queue is not empty."""
        first, budget = self._queue.first, self._limits.chunk_size
        ends: dict[PrefillRequest, int] = {}
        if not self._queue.oldest_is_due:
            self._owed = min(budget, self._owed + budget // 2)
            kept = self._slice(first, first.scheduled, self._owed) - first.scheduled
            leading = [request for request in self._queue if request.priority == first.priority]
            shortest_first = sorted(leading, key=lambda request: request.left)
            budget = kept + self._fill(ends, shortest_first, budget - kept)
            if any(end == request.prompt_tokens for request, end in ends.items() if request is not first):
                budget -= kept - self._fill(ends, [first], kept)
                self._fill(ends, shortest_first, budget, whole=True)
                budget = 0
        self._fill(ends, self._queue, budget)
        self._owed = max(0, self._owed - (ends.get(first, first.scheduled) - first.scheduled))
        return ends

    def _fill(
        self, ends: dict[PrefillRequest, int], requests: Iterable[PrefillRequest], budget: int, *, whole: bool = False
    ) -> int:
        """Add slices of these requests, in this order, up to `budget` tokens; with `whole`, only to the end of a
        prompt. Returns the rest of the budget.
        """
        for request in requests:
            start = ends.get(request, request.scheduled)
            end = self._slice(request, start, budget)
            if start < request.prompt_tokens and (end == start or (whole and end < request.prompt_tokens)):
                break  # less than a page is left
            ends[request] = end
            budget -= end - start
        return budget

    def _slice(self, request: PrefillRequest, start: int, tokens: int) -> int:
        """The end of a slice of at most `tokens` tokens. A slice that does not end its prompt ends on a page boundary,
        so no page is sent twice.
        """
        end = min(request.prompt_tokens, start + tokens)
        return end if end == request.prompt_tokens else max(start, end - end % self._limits.page_size)


def _row(request: PrefillRequest, end: int) -> PrefillRow:
    assert request.grant is not None, f"{request.ref} computes without pages"
    return PrefillRow(request, request.scheduled, end, request.grant.pages, end == request.prompt_tokens)
