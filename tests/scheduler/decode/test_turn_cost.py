"""The cost of a turn of the engine loop does not depend on the number of waiting requests."""

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from pdserve.common.sampling import SamplingParams, TokenLogprob
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.decode.memory.hot_buffers import HotLimits
from pdserve.scheduler.decode.placement.peers import PrefillPeer
from pdserve.scheduler.decode.requests.limits import DecodeLimits
from pdserve.scheduler.decode.scheduler import DecodeScheduler
from pdserve.scheduler.messages.effects import SendToPeer
from pdserve.scheduler.messages.frontend import Submit
from pdserve.scheduler.messages.ranks import CopyDone, OpenHot
from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.prefill.request import PageSpace, PrefillRequest
from pdserve.scheduler.prefill.scheduler import PrefillScheduler
from pdserve.transfer.control.events import MessageReceived
from pdserve.transfer.protocol.messages import ChunkArrived, InstanceId, KvDestination, PrefillDone, TransferKey
from tests.scheduler.simulation.simulator import NO_UNITS

FEW, MANY = 20, 400
PEER = InstanceId("peer")
PAGE_SIZE, PROMPT, RUNNING = 4, 8, 4


def instructions(work: Callable[[], object]) -> int:
    """The number of Python instructions. It is deterministic, unlike time, but leaves out work inside C functions."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:  # returns itself, which has no type
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def assert_equal_cost(few: int, many: int) -> None:
    assert few > 100, "instructions were not counted"
    assert many <= 1.1 * few + MANY / 10


instructions(lambda: None)  # Python 3.12 counts no instructions in the first traced call


def decode_server(pages: int, hot_limits: HotLimits | None = None) -> DecodeScheduler:
    """A server where the batch of four requests is full."""
    limits = DecodeLimits(
        page_size=PAGE_SIZE,
        max_running_requests=RUNNING,
        max_queued_requests=10 * MANY,
        growth_tokens=4,
        retract_pages=0,
        queue_timeout_s=60,
        prefill_wait_s=30,
        prefill_timeout_s=60,
        request_timeout_s=600,
        quarantine_s=6,
    )
    scheduler = DecodeScheduler(limits, PageAllocator[KvPage](pages), [], hot_limits)
    scheduler.peer_up(PrefillPeer(PEER, {"here:1"}))
    submit(scheduler, RUNNING, PROMPT)
    arrive(scheduler)
    load(scheduler)
    turn(scheduler)
    assert len(scheduler.rooms.batch.running) == RUNNING
    return scheduler


def submit(scheduler: DecodeScheduler, count: int, tokens: int, endpoint: str | None = None) -> None:
    for _ in range(count):
        rid = f"r{scheduler.counters['requests']}"
        scheduler.handle(Submit(rid, tuple(range(tokens)), SamplingParams(max_new_tokens=5), endpoint), now=0.0)
    scheduler.advance(0.0)


def arrive(scheduler: DecodeScheduler) -> None:
    """Prefill delivers all dispatched prompts."""
    for effect in scheduler.take_effects():
        if isinstance(effect, SendToPeer) and isinstance(effect.message, KvDestination):
            key, tokens = effect.message.key, len(effect.arrays[0])
            scheduler.handle(
                MessageReceived(PEER, ChunkArrived(key, effect.message.prefix_tokens, tokens, ()), ()), 0.0
            )
            done = PrefillDone(
                key=key,
                first_tokens=(TokenLogprob(1, None),),
                prompt_tokens=tokens,
                chunks=1,
                writes=1,
                bytes_written=1,
                queue_s=0,
                compute_s=0.1,
                transfer_tail_s=0,
                cached_tokens=0,
            )
            scheduler.handle(MessageReceived(PEER, done, ()), 0.0)


def load(scheduler: DecodeScheduler) -> None:
    """Ranks copy the rows of admitted requests into their hot buffers."""
    for effect in scheduler.take_effects():
        if isinstance(effect, OpenHot) and effect.copy is not None:
            scheduler.handle(CopyDone(0, effect.copy, 0.0), 0.0)


def turn(scheduler: DecodeScheduler) -> None:
    """A turn of the loop that starts a step; none ends."""
    scheduler.advance(0.1)
    scheduler.next_step(0.1)
    scheduler.load()
    scheduler.take_effects()


def with_queued(count: int) -> DecodeScheduler:
    """Requests that wait for memory: each is as large as the pool."""
    scheduler = decode_server(64)
    submit(scheduler, count, 64 * PAGE_SIZE - 4)
    return scheduler


def with_pinned(count: int) -> DecodeScheduler:
    """Requests that wait for an absent prefill server."""
    scheduler = decode_server(64)
    submit(scheduler, count, PROMPT, "elsewhere:1")
    return scheduler


def with_prefilling(count: int) -> DecodeScheduler:
    scheduler = decode_server(10 * MANY)
    submit(scheduler, count, PROMPT)
    return scheduler


def with_ready(count: int) -> DecodeScheduler:
    """Requests that wait for a place in the batch."""
    scheduler = with_prefilling(count)
    arrive(scheduler)
    return scheduler


def with_arrived(count: int) -> DecodeScheduler:
    """Requests that wait for a hot buffer."""
    limits = HotLimits(num_pages=3 * RUNNING, page_size=4, hot_rows=8, slots=RUNNING, overlay=NO_UNITS)
    scheduler = decode_server(10 * MANY, limits)
    submit(scheduler, count, PROMPT)
    arrive(scheduler)
    return scheduler


@pytest.mark.parametrize(
    ("make_server", "state"),
    [
        (with_queued, "queued"),
        (with_pinned, "queued"),
        (with_prefilling, "prefilling"),
        (with_ready, "ready"),
        (with_arrived, "arrived"),
    ],
)
def test_cost_of_a_decode_turn_does_not_grow_with_waiting_requests(
    make_server: Callable[[int], DecodeScheduler], state: str
) -> None:
    costs = []
    for count in (FEW, MANY):
        scheduler = make_server(count)
        assert scheduler.state_counts()[state] == count
        costs.append(instructions(partial(turn, scheduler)))
        assert scheduler.state_counts()[state] == count
    assert_equal_cost(*costs)


def test_cost_of_a_passed_deadline_does_not_grow_with_open_requests() -> None:
    """Clients choose deadlines: with a scan of all requests, each of thousands would cost one."""
    costs = []
    for count in (FEW, MANY):
        scheduler = with_queued(count)
        prompt = tuple(range(64 * PAGE_SIZE - 4))
        scheduler.handle(Submit("hasty", prompt, SamplingParams(max_new_tokens=5), timeout_s=1.0), now=0.0)
        scheduler.advance(0.5)
        assert scheduler.state_counts()["queued"] == count + 1
        costs.append(instructions(partial(scheduler.advance, 1.0)))
        assert scheduler.state_counts()["queued"] == count
    assert_equal_cost(*costs)


def test_cost_of_a_prefill_turn_does_not_grow_with_waiting_requests() -> None:
    limits = PrefillLimits(
        page_size=PAGE_SIZE,
        chunk_size=8,
        max_queued_requests=MANY,
        context_length=64,
        vocab_size=100,
    )
    costs = []
    for count in (FEW, MANY):
        scheduler = PrefillScheduler(limits, PageAllocator[KvPage](4))
        scheduler.peer_up(PEER, PageSpace(100, PAGE_SIZE))
        for number in range(count):
            wanted = KvDestination(
                key=TransferKey(number, 1),
                rid=f"r{number}",
                sampling=SamplingParams(max_new_tokens=4),
                timeout_s=60,
                prefix_tokens=0,
                room=number,
            )
            scheduler.receive(PrefillRequest(PEER, wanted, range(12), [0, 1, 2], 0.0), 0.0)
        scheduler.advance(0.0)
        assert sum(request.grant is None for request in scheduler.requests.values()) == count - 1
        costs.append(instructions(partial(scheduler.advance, 0.1)))
    assert_equal_cost(*costs)
