"""COMPUTING requests: divides them into steps, tracks the steps in flight, and measures their rate."""

import collections
from collections.abc import Iterator

from ..chunking.chunk_queue import Chunk, ChunkQueue
from ..chunking.shared_prefix import PrefixesInProgress
from ..rates import Rate
from .limits import PrefillLimits
from .request import PrefillRequest, PrefillStep


class ComputeQueue:
    """The queue of COMPUTING requests (chunk_queue.py), and the steps that they are in."""

    def __init__(self, limits: PrefillLimits) -> None:
        self._limits = limits
        self._queue: ChunkQueue[PrefillRequest] = ChunkQueue(limits.page_size, limits.slo_ttft_s)
        self.prefixes = PrefixesInProgress(limits.page_size, limits.chunk_size, enabled=limits.prefix_cache)
        self._steps: collections.deque[tuple[PrefillStep, float]] = collections.deque()
        """In flight, oldest first, with the time of their start."""
        self._ended_at: collections.deque[float] = collections.deque(maxlen=limits.stages)
        """When the last steps ended; as many as the pipeline has stages."""
        self._commands = 0
        self.rate = Rate()
        """Tokens per second, while there is something to compute."""

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[PrefillRequest]:
        return iter(self._queue)

    @property
    def steps(self) -> int:
        """Steps in flight."""
        return len(self._steps)

    @property
    def running(self) -> set[PrefillRequest]:
        """Requests in steps in flight. The others wait."""
        return {chunk.owner for step, _ in self._steps for chunk in step.chunks}

    def computing_for(self, seconds: float, now: float) -> list[PrefillRequest]:
        """The requests of the oldest step in flight, if it was sent to the ranks at least `seconds` ago."""
        if not self._steps or now - self._steps[0][1] < seconds:
            return []
        return [chunk.owner for chunk in self._steps[0][0].chunks]

    def add(self, request: PrefillRequest) -> None:
        """Add a request that has its pages."""
        self._queue.add(request)
        request.progress = self.prefixes.start(request.token_ids, request.computed, request.priority)

    def remove(self, request: PrefillRequest) -> None:
        """Remove a request that is computed or has ended. Its chunks in steps in flight are ignored."""
        self._queue.remove(request)
        if request.progress is not None:
            self.prefixes.end(request.progress)

    def cached(self, request: PrefillRequest) -> None:
        """All computed tokens of a request are in the prefix cache now: requests that wait for them may start."""
        if request.progress is not None:
            self.prefixes.cached(request.progress, request.computed)

    def may_start_step(self) -> bool:
        """Whether the ranks take another step."""
        return len(self._steps) < self._limits.steps_in_flight

    def next_step(self, now: float) -> PrefillStep | None:
        """The next step, of at most `chunk_size` tokens; None if there is nothing to compute, or enough steps are in
        flight.
        """
        if not self.may_start_step():
            return None
        chunks = self._queue.next_chunks(self._limits.chunk_size, now, self.rate.per_s)
        if not chunks:
            return None
        self._commands += 1
        step = PrefillStep(self._commands, chunks)
        self._steps.append((step, now))
        return step

    def take(self, command_id: int, now: float) -> list[Chunk[PrefillRequest]]:
        """Take the chunks of the oldest step, which has ended. Its compute time counts from its start or, if that was
        later, from when the pipeline had a free stage for it.
        """
        step, started_at = self._steps.popleft()
        assert step.command_id == command_id, f"step {command_id} has ended before step {step.command_id}"
        entered_at = self._ended_at[0] if len(self._ended_at) == self._limits.stages else started_at
        last_ended_at = self._ended_at[-1] if self._ended_at else started_at
        self._ended_at.append(now)
        for request in {chunk.owner for chunk in step.chunks}:
            request.compute_s += now - max(started_at, entered_at, request.computed_at)
            request.computed_at = now
        tokens = sum(chunk.end - chunk.start for chunk in step.chunks)
        self.rate.measured(tokens, now - max(started_at, last_ended_at))
        return step.chunks
