"""Requests whose KV is here: who waits, who runs, who is in which step, and which steps are under way."""

import collections
import dataclasses

import msgspec

from ...memory.index_spaces import KvPage, RequestSlot
from ..messages.lifecycle import State
from .memory.hot_buffers import HotBuffers
from .requests.request import Request
from .requests.waiting_queue import WaitingQueue


class DecodeRow(msgspec.Struct, frozen=True):
    """One sequence of a decode step: feed `token` at `position`, with its KV in `pages`.

    A token that is not known yet is None: it is the one that row `follows` of the step before this one draws.
    `output_index` is the index, in the output, of the token that this step draws.
    """

    request: Request
    token: int | None
    follows: int | None
    position: int
    pages: list[KvPage]
    output_index: int
    hot_slot: RequestSlot | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeStep:
    """A batch that is under way. Steps end in the order in which they were given."""

    command_id: int
    rows: list[DecodeRow]


class RunQueue:
    """ARRIVED and READY requests in line, RUNNING ones, and the steps these are in.

    With several stages, as many batches of different requests are under way. With one, the step after the one under way
    is given already if `overlap` is on: its rows feed tokens that are drawn by then.
    """

    def __init__(self, *, stages: int, overlap: bool, most_running: int) -> None:
        self._stages = stages
        self._look_ahead = overlap
        self._most_running = most_running
        self.arrived = WaitingQueue()
        """They wait for a hot buffer."""
        self.ready = WaitingQueue()
        """They wait for a place in the batch."""
        self.running: list[Request] = []
        self.held_back: Request | None = None
        """It gets no further step for now: it is to be retracted when it is in none."""
        self._steps: collections.deque[DecodeStep] = collections.deque()
        """Under way, oldest first."""

    def remove(self, request: Request) -> None:
        """It has ended, was retracted or moves on. Steps that it is in go on without meaning."""
        match request.state:
            case State.ARRIVED:
                self.arrived.remove(request)
            case State.READY:
                self.ready.remove(request)
            case _:
                self.running.remove(request)

    def fill(self) -> list[Request]:
        """Those that may run from now on; the caller changes their state."""
        count = min(len(self.ready), self._most_running - len(self.running))
        joined = [self.ready.pop() for _ in range(count)]
        self.running += joined
        return joined

    def may_give_step(self) -> bool:
        """Whether the ranks can take another step."""
        if self._stages > 1:
            return len(self._steps) < self._stages
        if not self._steps:
            return True
        known_late = any(request.sampling.counts_tokens for request in self.running)
        return self._look_ahead and len(self._steps) < 2 and not known_late

    def next_batch(self) -> list[Request]:
        """Who is in the next step. With several stages, each batch is an even share of those whose turn it is."""
        able = [request for request in self.running if request is not self.held_back]
        if self._stages == 1:
            return [request for request in able if request.may_step]
        waiting = sorted((request for request in able if not request.in_flight), key=lambda request: request.last_step)
        return waiting[: -(-len(self.running) // self._stages)]

    def give(self, batch: list[Request], command_id: int, hot: HotBuffers | None) -> DecodeStep:
        """The step of a batch, which is under way from now on."""
        before = {row.request: index for index, row in enumerate(self._steps[-1].rows)} if self._steps else {}
        step = DecodeStep(command_id, [_row(request, before, hot) for request in batch])
        for request in batch:
            request.in_flight += 1
            request.last_step = command_id
        self._steps.append(step)
        return step

    def take(self, command_id: int) -> list[DecodeRow]:
        """The rows of a step that has ended."""
        step = self._steps.popleft()
        assert step.command_id == command_id, f"step {command_id} has ended before step {step.command_id}"
        for row in step.rows:
            row.request.in_flight -= 1
        return step.rows


def _row(request: Request, before: dict[Request, int], hot: HotBuffers | None) -> DecodeRow:
    """The next row of a request; `before` says where it was in the step before."""
    return DecodeRow(
        request=request,
        token=None if request.in_flight else request.output_ids[-1],
        follows=before[request] if request.in_flight else None,
        position=request.kv_tokens + request.in_flight,
        pages=request.pages,
        output_index=len(request.output_ids) + request.in_flight,
        hot_slot=hot.of(request.rid).slot if hot is not None else None,
    )
