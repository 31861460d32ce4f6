"""Staging in the two schedulers, case by case; `test_staged_traces.py` has random workloads."""

import pytest

from pdserve.common.sampling import SamplingParams
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.messages.effects import SendToPeer
from pdserve.scheduler.messages.ranks import ChunkReport, PartReport
from pdserve.scheduler.messages.step import StepResult
from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.prefill.request import PageSpace, PrefillRequest
from pdserve.scheduler.prefill.scheduler import PrefillScheduler
from pdserve.transfer.control.events import MessageReceived, PeerClosed, PeerLost
from pdserve.transfer.data.chunks import ChunkWrite, ChunkWritten, PartWrite, PartWritten
from pdserve.transfer.protocol.messages import (
    Abort,
    AbortAck,
    AnyMessage,
    ChunkArrived,
    KvDestination,
    StageArrived,
    StageFree,
    StageGrant,
    StagePart,
    StageRequest,
    StageStopped,
    TransferFailed,
    TransferKey,
)
from tests.scheduler.simulation.simulator import DECODE, PAGE_SIZE, PAGES
from tests.scheduler.simulation.staged_simulator import REGIONS, RING, TOKEN_BYTES, StagedSimulator

KEY = TransferKey(1, 1)


class Prefill:
    """A prefill scheduler with one transfer of six tokens to a decode server that takes two staged pieces of each."""

    def __init__(self) -> None:
        limits = PrefillLimits(page_size=2, chunk_size=4, max_queued_requests=3, context_length=64, vocab_size=100)
        self.scheduler = PrefillScheduler(limits, PageAllocator[KvPage](13))
        self.scheduler.peer_up(DECODE, PageSpace(PAGES, PAGE_SIZE), REGIONS)
        destination = KvDestination(KEY, "r", SamplingParams(max_new_tokens=1), 60.0)
        self.scheduler.receive(PrefillRequest(DECODE, destination, list(range(10, 16)), [3, 5], 0.0), 0.0)
        self.scheduler.advance(0.0)
        self.writes: list[ChunkWrite] = []
        self.parts: list[PartWrite] = []

    def messages(self) -> list[AnyMessage]:
        """The messages to decode; writes go to `writes` and `parts`."""
        sent = []
        for effect in self.scheduler.take_effects():
            match effect:
                case SendToPeer(message=message):
                    sent.append(message)
                case ChunkWrite():
                    self.writes.append(effect)
                case PartWrite():
                    self.parts.append(effect)
        return sent

    def start_step(self) -> list[StagePart]:
        """Start the next step; returns the parts for which regions are requested."""
        assert self.scheduler.next_step(0.0) is not None
        requests = self.messages()
        assert all(isinstance(message, StageRequest) for message in requests)
        return [message.part for message in requests if isinstance(message, StageRequest)]

    def grant(self, part: StagePart, offset: int) -> None:
        self.scheduler.handle(MessageReceived(DECODE, StageGrant(part, offset, offset), ()), 0.0)

    def end_direct(self, *, ok: bool = True) -> None:
        chunk = self.writes.pop(0)
        reason = "" if ok else "broken"
        written = ChunkWritten(DECODE, chunk.key, chunk.token_start, chunk.token_end, ok, reason, writes=2)
        self.scheduler.handle(ChunkReport(0, written), 0.0)

    def end_part(self, *, ok: bool = True, late: bool = False) -> StagePart:
        part = self.parts.pop(0).part
        written = PartWritten(DECODE, part, ok, "" if ok else "broken", late, 1, part.tokens * TOKEN_BYTES)
        self.scheduler.handle(PartReport(0, written), 0.0)
        return part


def test_regions_are_requested_before_the_step_and_a_chunk_arrives_after_its_last_part() -> None:
    prefill = Prefill()
    parts = prefill.start_step()
    assert [(part.writer, part.token_start, part.token_end) for part in parts] == [
        (0, 0, 2),
        (1, 0, 2),
        (0, 2, 4),
        (1, 2, 4),
    ]
    for index, part in enumerate(parts[:3]):
        prefill.grant(part, 256 * index)
    assert prefill.messages() == []
    assert prefill.parts == [], "nothing is written before it is computed"
    prefill.scheduler.step_done(1, [StepResult((), ())], 0.0)
    assert prefill.messages() == []
    assert [(part_write.part, part_write.offset) for part_write in prefill.parts] == [
        (part, 256 * index) for index, part in enumerate(parts[:3])
    ]
    assert prefill.scheduler.counters["staged_grants_waited"] == 1
    first = prefill.end_part()
    assert prefill.messages() == [StageArrived(first, 0)]
    prefill.scheduler.handle(MessageReceived(DECODE, StageFree(first), ()), 0.0)
    prefill.grant(parts[3], 0)
    prefill.end_direct()
    for _ in range(2):
        prefill.end_part()
    assert ChunkArrived(KEY, 0, 4) not in prefill.messages()
    prefill.end_part()
    assert prefill.messages() == [StageArrived(parts[3], 0), ChunkArrived(KEY, 0, 4)]
    (request,) = prefill.scheduler.requests.values()
    assert request.writes == 2 + 4
    assert prefill.scheduler.counters["staged_bytes"] == 8 * TOKEN_BYTES


def test_abort_is_acknowledged_at_once_when_nothing_is_being_written() -> None:
    prefill = Prefill()
    parts = prefill.start_step()
    prefill.grant(parts[0], 0)
    prefill.scheduler.handle(MessageReceived(DECODE, Abort(KEY, "gone"), ()), 0.0)
    assert prefill.messages() == [*(StageStopped(part) for part in parts), AbortAck(KEY)]
    prefill.scheduler.step_done(1, [StepResult((), ())], 0.0)
    assert prefill.messages() == []
    assert prefill.scheduler.staging.parts == 0


def test_grammar_that_is_too_complex_is_reported_to_decode() -> None:
    prefill = Prefill()
    prefill.start_step()
    prefill.scheduler.step_done(1, [StepResult((), (), "too many items", too_complex=True)], 0.0)
    failed = TransferFailed(KEY, "too many items", retryable=False, too_complex=True)
    assert [message for message in prefill.messages() if isinstance(message, TransferFailed)] == [failed]


def test_abort_is_acknowledged_after_the_part_in_flight_has_ended() -> None:
    prefill = Prefill()
    parts = prefill.start_step()
    prefill.grant(parts[0], 0)
    prefill.scheduler.step_done(1, [StepResult((), ())], 0.0)
    prefill.scheduler.handle(MessageReceived(DECODE, Abort(KEY, "gone"), ()), 0.0)
    assert prefill.messages() == [StageStopped(part) for part in parts[1:]]
    prefill.end_direct(ok=False)
    assert prefill.messages() == []
    prefill.end_part(ok=False, late=True)
    assert prefill.messages() == [StageStopped(parts[0], late_writes=True), AbortAck(KEY, late_writes=True)]
    assert prefill.scheduler.allocator.available == 13


def test_failed_part_fails_the_transfer_after_the_other_parts_have_ended() -> None:
    prefill = Prefill()
    parts = prefill.start_step()
    for index, part in enumerate(parts[:2]):
        prefill.grant(part, 256 * index)
    prefill.scheduler.step_done(1, [StepResult((), ())], 0.0)
    prefill.messages()
    prefill.end_direct()
    prefill.end_part(ok=False, late=True)
    stopped = prefill.messages()
    assert stopped == [StageStopped(parts[0], late_writes=True), *(StageStopped(part) for part in parts[2:])]
    prefill.end_part()
    assert prefill.messages() == [
        StageStopped(parts[1]),
        TransferFailed(KEY, "broken", retryable=True, late_writes=True),
    ]


def test_grant_outside_the_ring_fails_its_transfer() -> None:
    prefill = Prefill()
    parts = prefill.start_step()
    prefill.grant(parts[0], RING.size_bytes)
    *stopped, failed = prefill.messages()
    assert stopped == [StageStopped(part) for part in parts]
    assert failed == TransferFailed(KEY, "decode granted offset 768 of a ring of 768 bytes", retryable=True)


def submitted(simulator: StagedSimulator) -> tuple[StagedSimulator, StagePart]:
    simulator.submit(6, 0, 4, 1, "a:1", 0)
    simulator.decode_turn()
    (key,) = simulator.decode.rooms.prefilling.prompts
    return simulator, StagePart(RING.epoch, key, 0, 0, REGIONS[0].block, 0, 2)


@pytest.mark.parametrize("problem", ["size", "rank", "tokens"])
def test_invalid_staging_request_fails_its_transfer(problem: str) -> None:
    simulator, part = submitted(StagedSimulator())
    (server,) = (server for server in simulator.servers.values() if server.endpoint == "a:1")
    tokens = (0, 40) if problem == "tokens" else (0, 2)
    part = StagePart(part.epoch, part.key, 0, 7 if problem == "rank" else 0, part.block, *tokens)
    size = 1 if problem == "size" else part.tokens * TOKEN_BYTES
    simulator.decode.handle(MessageReceived(server.instance, StageRequest(part, size), ()), 0.0)
    simulator.act()
    assert simulator.decode.counters["requests_failed"] == 1
    assert [effect.message.key for effect in server.to_prefill if isinstance(effect.message, Abort)] == [part.key]
    simulator.finish()


@pytest.mark.parametrize("killed", [False, True])
def test_prefill_done_waits_for_the_last_scatter(killed: bool) -> None:
    """Also if the prefill server was killed before."""
    simulator, _ = submitted(StagedSimulator())
    for _ in range(40):
        simulator.prefill_turn(0)
        for which in range(2):
            simulator.end_write(which, ok=True, late=False)
            simulator.end_part(which, ok=True, late=False)
        for server in simulator.servers.values():
            while server.to_prefill:
                simulator._deliver_down(server)
            while server.to_decode:
                simulator._deliver_up(server)
        if len(simulator.scatters) == 1 and simulator.decode.counters["staged_parts"] == 5:
            break
        while simulator.scatters:
            simulator.scatter_turn(0)
    (request,) = simulator.decode.requests.values()
    assert not request.output_ids
    if killed:
        while simulator.servers:
            simulator.kill(0)
    simulator.scatter_turn(0)
    assert request.output_ids == [50]


def test_reconnect_of_decode_during_a_part_write_leaks_nothing() -> None:
    """The same server closes its connection and opens another; then the writes of the first report their end."""
    prefill = Prefill()
    parts = prefill.start_step()
    prefill.grant(parts[0], 0)
    prefill.scheduler.step_done(1, [StepResult((), ())], 0.0)
    prefill.messages()
    prefill.scheduler.handle(PeerLost(DECODE, "cut off"), 0.0)
    prefill.scheduler.handle(PeerClosed(DECODE), 0.0)
    prefill.scheduler.peer_up(DECODE, PageSpace(PAGES, PAGE_SIZE), REGIONS)
    prefill.end_part(ok=False, late=True)
    prefill.end_direct(ok=False)
    assert not prefill.scheduler.requests
    assert prefill.scheduler.allocator.available == 13
