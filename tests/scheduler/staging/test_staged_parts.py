"""The messages and the memory of one staged part, on each side; `test_staging_lives.py` has everything at once."""

import collections

import pytest

from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.decode.memory.holds import Holds
from pdserve.scheduler.decode.rooms.staging import RankRing, StagedArrivals
from pdserve.scheduler.messages.effects import Effect, SendToPeer
from pdserve.scheduler.prefill.staging import StagedSends
from pdserve.transfer.data.chunks import ChunkWrite, PartScatter, PartWrite, PartWritten
from pdserve.transfer.plan.copy_regions import CopyRegion
from pdserve.transfer.plan.ring import ALIGNMENT, StagingRing
from pdserve.transfer.plan.staged_regions import StagedRegion
from pdserve.transfer.protocol.messages import (
    HeadSlice,
    InstanceId,
    PrefillDone,
    StageArrived,
    StageFree,
    StageGrant,
    StagePart,
    StageRequest,
    StageRing,
    StageStopped,
    TransferKey,
)

QUARANTINE_S = 5.0
RANK = 1
RING = StageRing(0, 8 * ALIGNMENT, epoch=9)
PREFILL, DECODE = InstanceId("prefill"), InstanceId("decode")
KEY = TransferKey(7, 1)
BLOCK = HeadSlice(0, 2, 0, 1)
REGIONS = [  # a token takes one unit of the ring
    StagedRegion(CopyRegion(writer, RANK, range(2), range(1)), RING, ALIGNMENT, 4 * ALIGNMENT) for writer in range(2)
]
DONE = PrefillDone(KEY, (), 8, 1, 0, 0, 0.0, 0.0, 0.0)


def part(start: int = 0, end: int = 4, *, writer: int = 0) -> StagePart:
    return StagePart(RING.epoch, KEY, writer, RANK, BLOCK, start, end)


def request(of: StagePart) -> StageRequest:
    return StageRequest(of, of.tokens * ALIGNMENT)


class Decode:
    """Rings of 8 units on two ranks; a transfer of 8 tokens, of which two prefill ranks write a part each to rank 1."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.ring: StagingRing[StagePart] = StagingRing(RING.size_bytes)
        rings = [
            RankRing(StagingRing(RING.size_bytes), ALIGNMENT // 2),
            RankRing(self.ring, ALIGNMENT // 2),
        ]
        self.allocator = PageAllocator[KvPage](4, first=10)
        commands = Holds(self.allocator)
        self.staging = StagedArrivals(rings, 2, QUARANTINE_S, collections.Counter(), self.effects, commands)
        self.staging.peer_up(PREFILL, REGIONS)
        grant = self.allocator.grant("prompt", 4)
        assert grant is not None
        self.grant = grant
        self.staging.open(KEY, PREFILL, 0, 8, grant)

    def take(self) -> list[object]:
        """Messages to PREFILL and scatters since the last call."""
        taken: list[object] = []
        for effect in self.effects:
            assert not isinstance(effect, SendToPeer) or effect.instance == PREFILL
            taken.append(effect.message if isinstance(effect, SendToPeer) else effect)
        self.effects.clear()
        return taken

    def receive(self, message: StageRequest | StageArrived | StageStopped, now: float = 0.0) -> list[object]:
        assert self.staging.receive(PREFILL, message, now) is None
        return self.take()

    def granted(self, of: StagePart) -> StageGrant:
        (grant,) = self.receive(request(of))
        assert isinstance(grant, StageGrant)
        return grant

    def scattered(self, of: StagePart) -> list[object]:
        self.staging.scattered(of)
        return self.take()

    def due(self, now: float) -> list[object]:
        self.staging.due(now)
        return self.take()

    def writer_stopped(self, now: float, *, late_writes: bool) -> list[object]:
        self.staging.writer_stopped(KEY, late_writes=late_writes, now=now)
        return self.take()


class Prefill:
    """A prefill server that stages to one decode rank, in parts of at most 4 tokens."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.staging = StagedSends(2, collections.Counter(), self.effects)
        self.staging.regions[DECODE] = REGIONS[:1]

    def take(self) -> list[object]:
        """Messages to decode and writes since the last call."""
        taken: list[object] = [effect.message if isinstance(effect, SendToPeer) else effect for effect in self.effects]
        self.effects.clear()
        return taken

    def request(self, tokens: int = 4) -> list[object]:
        self.staging.request((DECODE, KEY), 0, tokens)
        return self.take()

    def computed(self, tokens: int = 4) -> list[object]:
        self.staging.send(ChunkWrite(DECODE, KEY, 0, tokens, [20, 21, 22, 23][: tokens // 2], []))
        return self.take()

    def granted(self, grant: StageGrant) -> list[object]:
        assert self.staging.granted(DECODE, grant) is None
        return self.take()

    def written(self, of: StagePart, *, ok: bool = True, late_writes: bool = False) -> list[object]:
        self.staging.part_written(PartWritten(DECODE, of, ok, "" if ok else "broken", late_writes))
        return self.take()

    def stop(self) -> list[object]:
        self.staging.stop((DECODE, KEY))
        return self.take()


def test_part_goes_from_request_to_free() -> None:
    prefill, decode = Prefill(), Decode()
    assert prefill.request() == [request(part())]
    grant = decode.granted(part())
    assert prefill.granted(grant) == []
    assert prefill.computed() == [PartWrite(DECODE, part(), 0, 4 * ALIGNMENT, [20, 21], 0)]
    arrived = StageArrived(part(), grant.region)
    assert prefill.written(part()) == [arrived]
    assert decode.receive(arrived) == [PartScatter(part(), 0, 4 * ALIGNMENT, [10, 11], 0)]
    assert decode.grant.users == 2, "the scatter holds the pages"
    assert decode.scattered(part()) == [StageFree(part())]
    assert (decode.ring.waiting, decode.ring.granted_bytes) == (0, 0)


def test_transfer_lands_when_the_last_part_of_all_writers_is_scattered() -> None:
    decode = Decode()
    assert decode.staging.misses(KEY)
    parts = [part(0, 4), part(4, 8), part(0, 4, writer=1), part(4, 8, writer=1)]
    results = []
    for one in parts:
        decode.receive(StageArrived(one, decode.granted(one).region))
        decode.staging.scattered(one)
        results.append(decode.staging.misses(KEY))
        decode.take()
    assert results == [True, True, True, False]
    decode.staging.close(KEY)
    decode.staging.check_integrity(idle=True)


def test_messages_that_an_older_prefill_server_repeats_change_nothing() -> None:
    """It repeats each message until it is answered, the final one until StageFree."""
    decode = Decode()
    decode.granted(part(0, 4))
    for first in (request(part(4, 8)), request(part(0, 4, writer=1))):
        decode.receive(first)
        assert decode.receive(first) == [], "queued or granted"
    assert (decode.ring.waiting, decode.ring.granted_bytes) == (1, 8 * ALIGNMENT)
    arrived, stopped = StageArrived(part(0, 4), 0), StageStopped(part(4, 8), late_writes=True)
    assert len(decode.receive(arrived)) == 1
    assert decode.receive(arrived) == [], "it is being scattered"
    assert decode.receive(stopped, 10.0) == []
    assert decode.receive(stopped, 11.0) == []
    free, _ = decode.scattered(part(0, 4))
    assert free == StageFree(part(0, 4))
    assert decode.receive(arrived) == [StageFree(part(0, 4))]
    assert decode.due(10.0 + QUARANTINE_S) == [StageFree(part(4, 8))], "counted from the first message"
    assert decode.receive(stopped) == [StageFree(part(4, 8))]
    decode.staging.close(KEY)
    assert decode.receive(request(part(4, 8, writer=1))) == [StageFree(part(4, 8, writer=1))]


@pytest.mark.parametrize("ending", ["written", "failed", "stopped"])
def test_prefill_forgets_a_part_after_its_final_message(ending: str) -> None:
    prefill = Prefill()
    prefill.request()
    if ending == "stopped":
        assert prefill.stop() == [StageStopped(part())]
    else:
        prefill.granted(StageGrant(part(), 0, 0))
        prefill.computed()
        final = StageArrived(part(), 0) if ending == "written" else StageStopped(part())
        assert prefill.written(part(), ok=ending == "written") == [final]
    assert prefill.staging.parts == 0
    assert prefill.granted(StageGrant(part(), 0, 0)) == [], "a grant that crossed it"


def test_stopped_request_leaves_the_queue() -> None:
    decode = Decode()
    decode.granted(part(0, 4))
    assert decode.receive(request(part(0, 8, writer=1))) == []
    assert decode.receive(request(part(4, 8))) == []
    free, grant = decode.receive(StageStopped(part(0, 8, writer=1)))
    assert free == StageFree(part(0, 8, writer=1))
    assert isinstance(grant, StageGrant)
    assert grant.part == part(4, 8)


def test_region_of_an_aborted_transfer_is_freed_when_its_writer_has_stopped() -> None:
    decode = Decode()
    decode.granted(part(0, 8))
    assert decode.receive(request(part(0, 8, writer=1))) == []
    decode.staging.close(KEY)
    assert decode.take() == []
    assert decode.grant.users == 1, "only scatters write pages: they are safe at once"
    assert decode.due(1e9) == []
    assert decode.ring.granted_bytes == 8 * ALIGNMENT
    assert decode.writer_stopped(2.0, late_writes=False) == [StageFree(part(0, 8))]
    assert (decode.ring.waiting, decode.ring.granted_bytes) == (0, 0)


def test_quarantine_for_late_writes_is_not_shortened_by_later_messages() -> None:
    decode = Decode()
    decode.granted(part())
    decode.receive(StageStopped(part(), late_writes=True), 10.0)
    decode.writer_stopped(11.0, late_writes=False)
    decode.staging.peer_closed(PREFILL, 12.0)
    assert decode.due(14.9) == []
    assert decode.due(15.0) == [StageFree(part())]


def test_time_in_which_decode_did_not_run_is_not_part_of_the_quarantine() -> None:
    decode = Decode()
    decode.granted(part())
    decode.receive(StageStopped(part(), late_writes=True), 10.0)
    decode.staging.resumed(60.0, 71.0)
    assert decode.due(70.0 + QUARANTINE_S - 0.01) == []
    assert decode.due(70.0 + QUARANTINE_S) == [StageFree(part())]


def test_closed_connection_frees_regions_after_the_quarantine_and_silence_does_not() -> None:
    decode = Decode()
    decode.granted(part())
    decode.staging.close(KEY)
    assert decode.due(1e6) == []
    decode.staging.peer_closed(PREFILL, 1e6)
    assert decode.take() == []
    assert decode.due(1e6 + QUARANTINE_S) == [StageFree(part())]


def test_stopped_writer_gets_no_grants_for_its_queued_parts() -> None:
    decode = Decode()
    decode.granted(part(0, 8))
    decode.receive(request(part(0, 8, writer=1)))
    freed = [StageFree(part(0, 8)), StageFree(part(0, 8, writer=1))]
    assert decode.writer_stopped(0.0, late_writes=False) == freed
    assert (decode.ring.waiting, decode.ring.granted_bytes) == (0, 0)


def test_scatter_holds_the_pages_of_a_closed_transfer_until_it_has_ended() -> None:
    decode = Decode()
    decode.receive(StageArrived(part(), decode.granted(part()).region))
    decode.staging.close(KEY)
    assert decode.writer_stopped(0.0, late_writes=False) == []
    assert decode.grant.users == 2, "the scatter holds the pages"
    assert decode.scattered(part()) == [StageFree(part())]
    assert decode.grant.users == 1


def test_abort_stops_a_running_write_only_when_it_has_ended() -> None:
    prefill = Prefill()
    prefill.request(8)
    prefill.computed(8)
    grant = StageGrant(part(0, 4), 0, 0)
    assert prefill.granted(grant) == [PartWrite(DECODE, part(0, 4), 0, 4 * ALIGNMENT, [20, 21], 0)]
    assert prefill.stop() == [StageStopped(part(4, 8))]
    stopped = [StageStopped(part(0, 4), late_writes=True)]
    assert prefill.written(part(0, 4), ok=False, late_writes=True) == stopped


def test_messages_of_another_peer_change_nothing() -> None:
    decode = Decode()
    grant = decode.granted(part())
    other = InstanceId("other")
    for message in (StageArrived(part(), grant.region), StageStopped(part()), request(part())):
        assert decode.staging.receive(other, message, 0.0) is None
    assert decode.effects == []
    decode.staging.receive(other, request(part(4, 8)), 0.0)
    assert decode.effects == [SendToPeer(other, StageFree(part(4, 8)))]
    assert decode.ring.granted_bytes == 4 * ALIGNMENT


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (request(part(6, 9)), "tokens [0, 8)"),
        (request(part(6, 6)), "tokens [0, 8)"),
        (request(part(2, 6)), "those before 4 are requested already"),
        (request(part(writer=2)), "rank 2 does not write"),
        (StageRequest(part(4, 8), 4 * ALIGNMENT + 1), "requests 1025 bytes"),
    ],
)
def test_request_that_does_not_belong_to_the_transfer_is_refused(message: StageRequest, reason: str) -> None:
    decode = Decode()
    decode.granted(part())
    assert reason in (decode.staging.receive(PREFILL, message, 0.0) or "")
    assert decode.ring.granted_bytes == 4 * ALIGNMENT


def test_grant_outside_the_ring_is_refused() -> None:
    prefill = Prefill()
    prefill.request()
    prefill.computed()
    problem = prefill.staging.granted(DECODE, StageGrant(part(), 0, 5 * ALIGNMENT))
    assert problem == "decode granted offset 1280 of a ring of 2048 bytes"
    assert prefill.take() == []
