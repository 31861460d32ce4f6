"""Requests whose KV has arrived: waiting, opening, ready and running ones, and the steps in flight.

Running requests whose masks are slow sit out the steps until the rank that samples has computed their masks.
"""

import bisect
import collections
import dataclasses
import enum
import itertools
from collections.abc import Iterable, Iterator

import msgspec

from ....common.arithmetic import ceil_div
from ....memory.index_spaces import KvPage, RequestSlot
from ...chunking.chunk_queue import Chunk
from ...chunking.fair_queue import Overtakes
from ...messages.effects import Outbox
from ...messages.lifecycle import State
from ...messages.ranks import DropGrammarState, PrepareMask
from ..requests.limits import DecodeLimits
from ..requests.request import LocalPrompt, Request


class _Mask(enum.Enum):
    WANTED = enum.auto()
    """When its tokens in flight are known."""
    ASKED = enum.auto()
    READY = enum.auto()


class SlowMasks:
    """The mask of the next token of each such request. It is computed beside the steps, so the other rows of a step do
    not wait for it. Nobody starves: a request is in the next step when its mask is ready.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._next_number = itertools.count()
        self.masks: dict[Request, _Mask] = {}
        self._asked: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        """From now on, prepare the masks of a running request."""
        request.slow_masks = True
        self.masks.setdefault(request, _Mask.WANTED)

    def remove(self, request: Request) -> None:
        """It does not run any more. What a rank may still compute for it is not used."""
        if request.grammar_state is not None:
            self._outbox.append(DropGrammarState(request.grammar_state))
        if self.masks.pop(request, None) is _Mask.ASKED:
            self._asked = {number: other for number, other in self._asked.items() if other is not request}

    def able(self, requests: list[Request]) -> list[Request]:
        """Those that do not have to wait for a mask."""
        return [request for request in requests if self.masks.get(request, _Mask.READY) is _Mask.READY]

    def stepped(self, batch: Iterable[Request]) -> None:
        """A step has begun, which uses up the masks of its requests."""
        for request in batch:
            if request in self.masks:
                self.masks[request] = _Mask.WANTED

    def ask(self) -> int:
        """Have the masks computed of all requests whose newest token is known; returns how many."""
        ready = [request for request, mask in self.masks.items() if mask is _Mask.WANTED and not request.in_flight]
        for request in ready:
            number = next(self._next_number)
            self.masks[request], self._asked[number] = _Mask.ASKED, request
            draw = request.draw(len(request.output_ids), joined=request.joined)
            request.joined, request.masked_output = False, len(request.output_ids)
            self._outbox.append(PrepareMask(number, request.output_ids[-1], draw))
        return len(ready)

    def ready(self, number: int, *, slow: bool) -> Request | None:
        """A mask is computed: its request takes part in the next step. If it is not `slow` any more, those after it are
        computed in the steps. None if the request does not run any more.
        """
        request = self._asked.pop(number, None)
        if request is not None and slow:
            self.masks[request] = _Mask.READY
        elif request is not None:
            del self.masks[request]
            request.slow_masks = False
        return request


class RequestQueue:
    """Requests in the order of precedence. A request that is queued again regains its original position. Waiting
    requests of low priority are raised (fair_queue.py).
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._overtakes: Overtakes[Request] = Overtakes()

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __contains__(self, request: Request) -> bool:
        return request in self.requests[self._position(request) :]

    @property
    def first(self) -> Request:
        """The next request; the queue is not empty."""
        return self.requests[0]

    def push(self, request: Request) -> None:
        bisect.insort(self.requests, request, key=_precedence)

    def remove(self, request: Request) -> None:
        """Remove a request, which has to be in the queue."""
        self._overtakes.pop(request, None)
        del self.requests[self.requests.index(request, self._position(request))]

    def take(self, request: Request) -> None:
        """Remove a request that got what it waited for."""
        self.remove(request)
        self.passed_by(request.priority)

    def pop(self) -> Request:
        """Take the first; the queue is not empty."""
        first = self.first
        self.take(first)
        return first

    def passed_by(self, priority: int) -> None:
        """A request of this priority got what these wait for: it overtakes the oldest of a lower priority."""
        if not self.requests or priority <= self.requests[-1].priority:
            return
        passed = [request for request in self.requests if request.priority < priority]
        oldest = min(passed, key=lambda request: (request.started, request.sample))
        raised = self._overtakes.add(oldest, priority)
        if raised is not None and raised > oldest.priority:
            self.remove(oldest)
            oldest.priority = raised
            self.push(oldest)

    def _position(self, request: Request) -> int:
        """The index of the first request with the same precedence."""
        return bisect.bisect_left(self.requests, _precedence(request), key=_precedence)


def _precedence(request: Request) -> tuple[int, float, int]:
    return -request.priority, request.started, request.sample


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


class Batch:
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
        self.arrived = RequestQueue()
        """Wait for a hot buffer."""
        self.opening: set[Request] = set()
        """Their rows are copied into their hot buffers."""
        self.ready = RequestQueue()
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
                if request.grammar_state is not None:
                    self.slow_masks.remove(request)

    def fill(self) -> list[Request]:
        """Move ready requests into free places of the batch; returns them. The caller changes their state."""
        count = min(len(self.ready.requests), self._max_running - len(self.running))
        if count <= 0:
            return []
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
        able = [request for request in self.running if request is not self.paused]
        if self.slow_masks.masks:
            able = self.slow_masks.able(able)
        if self._stages == 1:
            return [request for request in able if request.may_step]
        waiting = sorted((request for request in able if not request.in_flight), key=lambda request: request.last_step)
        return waiting[: ceil_div(len(self.running), self._stages)]

    def start_step(
        self,
        batch: list[Request],
        command_id: int,
        chunks: list[Chunk[LocalPrompt]],
    ) -> DecodeStep:
        """Make the step of a batch and of chunks. It is in flight from now on."""
        previous = {row.request: index for index, row in enumerate(self._steps[-1].rows)} if self._steps else {}
        self._last_step = command_id
        step = DecodeStep(command_id, [_row(request, previous) for request in batch], chunks)
        for request in batch:
            request.in_flight += 1
            request.last_step = command_id
            request.joined = False
        if self.slow_masks.masks:
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


def _row(request: Request, previous: dict[Request, int]) -> DecodeRow:
    """The next row of a request; `previous` has the row index of each request in the previous step."""
    return DecodeRow(
        request=request,
        token=None if request.in_flight else request.output_ids[-1],
        follows=previous[request] if request.in_flight else None,
        position=request.kv_tokens + request.in_flight,
        pages=request.pages,
        output_index=len(request.output_ids) + request.in_flight,
        hot_slot=request.hot_slot,
        joined=request.joined,
    )
