"""Requests whose KV has arrived: waiting, opening, ready and running ones, and the steps in flight."""

import collections
import dataclasses
import itertools
from collections.abc import Callable

import msgspec

from ...configs.arithmetic import ceil_div
from ...memory.index_spaces import KvPage, RequestSlot
from ..chunking.chunk_queue import Chunk
from ..messages.lifecycle import State
from .requests.limits import DecodeLimits
from .requests.request import LocalPrompt, Request
from .requests.waiting_queue import WaitingQueue
from .slow_masks import SlowMasks


class DecodeRow(msgspec.Struct, frozen=True):
    """One sequence of a decode step: feed `token` at `position`, with its KV in `pages`.

    `token` is None if it is not known yet: row `follows` of the previous step samples it. `output_index` is the index,
    in the output, of the token that this step samples. `joined`: its first step since it joined the batch.
    """

    request: Request
    token: int | None
    follows: int | None
    position: int
    pages: list[KvPage]
    output_index: int
    hot_slot: RequestSlot | None = None
    joined: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeStep:
    """A batch in flight. Steps end in the order in which they were started."""

    command_id: int
    rows: list[DecodeRow]
    chunks: list[Chunk[LocalPrompt]] = dataclasses.field(default_factory=list)
    """Chunks of prompts that this server computes. They follow the rows, so that row i samples token i of the step."""


class RunQueue:
    """Queues of ARRIVED and READY requests, the OPENING and RUNNING ones, and the steps in flight.

    With several pipeline stages, as many batches of different requests are in flight. With one stage and overlap
    scheduling, the next step starts before the tokens of the last one are known here.
    """

    def __init__(self, limits: DecodeLimits, slow_masks: SlowMasks) -> None:
        self.slow_masks = slow_masks
        """RUNNING requests that sit out the steps until their next mask is computed."""
        self._grammar_states = itertools.count()
        self._stages = limits.stages
        self._overlap = limits.overlap
        self._max_running = limits.max_running_requests
        self.arrived = WaitingQueue()
        """Wait for a hot buffer."""
        self.opening: set[Request] = set()
        """Their rows are copied into their hot buffers."""
        self.ready = WaitingQueue()
        """Wait for a place in the batch."""
        self.running: list[Request] = []
        self.paused: Request | None = None
        """This request gets no further step, and loses memory when its steps in flight have ended."""
        self._steps: collections.deque[DecodeStep] = collections.deque()
        """In flight, oldest first."""
        self._last_step = 0
        """The `command_id` of the latest step."""

    @property
    def waiting(self) -> int:
        """Requests whose KV is here and that wait for a hot buffer or for a place in the batch."""
        places = self._max_running - len(self.running)
        return len(self.arrived) + max(0, len(self.opening) + len(self.ready) - places)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended, was retracted or changes its queue. Its rows in flight are ignored."""
        match request.state:
            case State.ARRIVED:
                self.arrived.remove(request)
            case State.OPENING:
                self.opening.remove(request)
            case State.READY:
                self.ready.remove(request)
            case _:
                self.running.remove(request)
                self.slow_masks.remove(request)

    def fill_batch(self) -> list[Request]:
        """Move ready requests into free places of the batch; returns them. The caller changes their state."""
        count = min(len(self.ready), self._max_running - len(self.running))
        joined = [self.ready.pop() for _ in range(count)]
        for request in joined:
            request.joined = True
            request.last_step = self._last_step  # it waits since now: those that run already come first
            if request.sampling.grammar is not None:
                request.grammar_state = next(self._grammar_states)
            if request.slow_masks:
                self.slow_masks.add(request)
        self.running += joined
        return joined

    @property
    def continuing(self) -> list[Request]:
        """Running requests that have further steps after those in flight."""
        return [request for request in self.running if request.may_step and request is not self.paused]

    def may_start_step(self) -> bool:
        """Whether another step may be sent to the ranks. Overlap scheduling allows a second step in flight, unless a
        running request needs to know its tokens so far to sample the next one (`counts_tokens`).
        """
        if self._stages > 1:
            return len(self._steps) < self._stages
        if not self._steps:
            return True
        needs_tokens = any(request.counts_tokens for request in self.running)
        return self._overlap and len(self._steps) < 2 and not needs_tokens

    def next_batch(self) -> list[Request]:
        """The requests of the next step. With several stages, a batch is an even share of the running requests, and a
        request is in one batch at a time; those that waited longest come first.
        """
        able = self.slow_masks.able([request for request in self.running if request is not self.paused])
        if self._stages == 1:
            return [request for request in able if request.may_step]
        waiting = sorted((request for request in able if not request.in_flight), key=lambda request: request.last_step)
        return waiting[: ceil_div(len(self.running), self._stages)]

    def start_step(
        self,
        batch: list[Request],
        command_id: int,
        hot_slot: Callable[[Request], RequestSlot | None],
        chunks: list[Chunk[LocalPrompt]],
    ) -> DecodeStep:
        """Make the step of a batch and of chunks. It is in flight from now on."""
        previous = {row.request: index for index, row in enumerate(self._steps[-1].rows)} if self._steps else {}
        self._last_step = command_id
        step = DecodeStep(command_id, [_row(request, previous, hot_slot(request)) for request in batch], chunks)
        for request in batch:
            request.in_flight += 1
            request.last_step = command_id
            request.joined = False
        self.slow_masks.stepped(batch)
        self._steps.append(step)
        return step

    def finish_step(self, command_id: int) -> DecodeStep:
        """The step that has ended."""
        step = self._steps.popleft()
        assert step.command_id == command_id, f"step {command_id} has ended before step {step.command_id}"
        for row in step.rows:
            row.request.in_flight -= 1
        return step


def _row(request: Request, previous: dict[Request, int], hot_slot: RequestSlot | None) -> DecodeRow:
    """The next row of a request; `previous` has the row index of each request in the previous step."""
    return DecodeRow(
        request=request,
        token=None if request.in_flight else request.output_ids[-1],
        follows=previous[request] if request.in_flight else None,
        position=request.kv_tokens + request.in_flight,
        pages=request.pages,
        output_index=len(request.output_ids) + request.in_flight,
        hot_slot=hot_slot,
        joined=request.joined,
    )
