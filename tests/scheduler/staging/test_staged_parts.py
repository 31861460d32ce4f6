"""The messages and the memory of one staged part, on each side; `test_lossy_staging.py` has everything at once."""

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
EPOCH = 9
RING = StageRing(0, 8 * ALIGNMENT, EPOCH)
PREFILL, DECODE = InstanceId("prefill"), InstanceId("decode")
KEY = TransferKey(7, 1)
BLOCK = HeadSlice(0, 2, 0, 1)
REGIONS = [  # a token takes one unit of the ring
    StagedRegion(CopyRegion(writer, RANK, range(2), range(1)), RING, ALIGNMENT, 4 * ALIGNMENT) for writer in range(2)
]
DONE = PrefillDone(KEY, (), 8, 1, 0, 0, 0.0, 0.0, 0.0)


def part(start: int = 0, end: int = 4, *, writer: int = 0, epoch: int = EPOCH) -> StagePart:
    return StagePart(epoch, KEY, writer, RANK, BLOCK, start, end)


def request(of: StagePart) -> StageRequest:
    return StageRequest(of, of.tokens * ALIGNMENT)


class Decode:
    """Rings of 8 units on two ranks; a transfer of 8 tokens, of which two prefill ranks write a part each to rank 1."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.ring: StagingRing[StagePart] = StagingRing(RING.size_bytes, epoch=EPOCH)
        rings = [
            RankRing(StagingRing(RING.size_bytes, epoch=EPOCH), ALIGNMENT // 2),
            RankRing(self.ring, ALIGNMENT // 2),
        ]
        self.pages = PageAllocator[KvPage](4, first=10)
        commands = Holds(self.pages)
        self.staging = StagedArrivals(rings, 2, QUARANTINE_S, collections.Counter(), self.effects, commands)
        self.staging.peer_up(PREFILL, REGIONS)
        grant = self.pages.grant("prompt", 4)
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
        self.staging.peer_up(DECODE, REGIONS[:1])

    def take(self) -> list[object]:
        """Messages to decode and writes since the last call."""
        taken: list[object] = [effect.message if isinstance(effect, SendToPeer) else effect for effect in self.effects]
        self.effects.clear()
        return taken

    def request(self, tokens: int = 4) -> list[object]:
        self.staging.request((DECODE, KEY), 0, tokens, 0.0)
        return self.take()

    def computed(self, tokens: int = 4) -> list[object]:
        self.staging.send(ChunkWrite(DECODE, KEY, 0, tokens, [20, 21, 22, 23][: tokens // 2], []), 0.0)
        return self.take()

    def receive(self, message: StageGrant | StageFree) -> list[object]:
        self.staging.receive(DECODE, message, 0.0)
        return self.take()

    def written(self, of: StagePart, *, ok: bool = True, late_writes: bool = False) -> list[object]:
        self.staging.part_written(PartWritten(DECODE, of, ok, "" if ok else "broken", late_writes), 0.0)
        return self.take()

    def abort(self) -> list[object]:
        self.staging.abort((DECODE, KEY), "aborted", 0.0)
        return self.take()

    def due(self, now: float) -> list[object]:
        self.staging.due(now)
        return self.take()


def test_part_goes_from_request_to_free() -> None:
    prefill, decode = Prefill(), Decode()
    assert prefill.request() == [request(part())]
    grant = decode.granted(part())
    assert prefill.receive(grant) == []
    assert prefill.computed() == [PartWrite(DECODE, part(), 0, 4 * ALIGNMENT, [20, 21], 0)]
    arrived = StageArrived(part(), grant.region)
    assert prefill.written(part()) == [arrived]
    assert decode.receive(arrived) == [PartScatter(part(), 0, 4 * ALIGNMENT, [10, 11], 0)]
    assert decode.grant.users == 2, "the scatter holds the pages"
    assert decode.receive(arrived) == []
    assert decode.receive(request(part())) == []
    assert decode.scattered(part()) == [StageFree(part())]
    assert decode.receive(arrived) == [StageFree(part())]
    assert decode.receive(request(part())) == [StageFree(part())]
    assert prefill.due(1.0) == [arrived]
    assert prefill.receive(StageFree(part())) == []
    assert prefill.due(9.0) == []
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


def test_repeated_request_gets_the_same_grant() -> None:
    prefill, decode = Prefill(), Decode()
    prefill.request()
    first = decode.granted(part())
    assert prefill.due(0.9) == []
    assert prefill.due(1.0) == [request(part())]
    assert prefill.due(1.9) == []
    assert decode.granted(part()) == first
    assert decode.ring.granted_bytes == 4 * ALIGNMENT


@pytest.mark.parametrize("ending", ["written", "failed", "aborted"])
def test_final_message_is_repeated_until_decode_frees_the_part(ending: str) -> None:
    """Also when the answer to it is lost."""
    prefill, decode = Prefill(), Decode()
    prefill.request()
    prefill.receive(decode.granted(part()))
    if ending == "aborted":
        (final,) = prefill.abort()
    else:
        prefill.computed()
        (final,) = prefill.written(part(), ok=ending == "written")
    assert isinstance(final, StageArrived | StageStopped)
    for turn in (1.0, 2.0, 3.0):
        assert prefill.due(turn - 0.1) == []
        assert prefill.due(turn) == [final]
    if ending == "written":
        assert len(decode.receive(final)) == 1
        assert decode.scattered(part()) == [StageFree(part())]
    else:
        assert decode.receive(final) == [StageFree(part())]
    assert (decode.ring.waiting, decode.ring.granted_bytes) == (0, 0)
    assert prefill.due(4.0) == [final]
    assert decode.receive(final) == [StageFree(part())], "the answer is repeated"
    assert prefill.receive(StageFree(part())) == []
    assert prefill.due(9.0) == []


def test_request_that_arrives_after_its_stop_is_not_granted() -> None:
    decode = Decode()
    assert decode.receive(StageStopped(part())) == [StageFree(part())]
    assert decode.receive(request(part())) == [StageFree(part())]
    assert (decode.ring.waiting, decode.ring.granted_bytes) == (0, 0)


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
    assert prefill.receive(StageGrant(part(0, 4), 0, 0)) == [
        PartWrite(DECODE, part(0, 4), 0, 4 * ALIGNMENT, [20, 21], 0)
    ]
    assert prefill.abort() == [StageStopped(part(4, 8))]
    assert prefill.receive(StageGrant(part(4, 8), 1024, 1024)) == []
    assert prefill.receive(StageFree(part(0, 4))) == []
    stopped = [StageStopped(part(0, 4), late_writes=True)]
    assert prefill.written(part(0, 4), ok=False, late_writes=True) == stopped


def test_messages_about_an_earlier_ring_change_nothing() -> None:
    """A restarted decode server counts its transfers from the start: keys repeat, the epoch does not."""
    decode = Decode()
    decode.granted(part())
    old = part(epoch=EPOCH - 1)
    for message in (request(old), StageArrived(old, 0), StageStopped(old)):
        assert decode.receive(message) == [StageFree(old)]
    assert decode.ring.granted_bytes == 4 * ALIGNMENT
    assert decode.granted(part()).offset == 0


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
        (request(part(2, 6)), "overlaps"),
        (request(part(writer=2)), "rank 2 does not write"),
        (StageRequest(part(4, 8), 4 * ALIGNMENT + 1), "requests 1025 bytes"),
    ],
)
def test_request_that_does_not_belong_to_the_transfer_is_refused(message: StageRequest, reason: str) -> None:
    decode = Decode()
    decode.granted(part())
    assert reason in (decode.staging.receive(PREFILL, message, 0.0) or "")
    assert decode.take() == [StageFree(message.part)]
    assert decode.ring.granted_bytes == 4 * ALIGNMENT


def test_grant_outside_the_ring_is_refused() -> None:
    prefill = Prefill()
    prefill.request()
    prefill.computed()
    assert prefill.receive(StageGrant(part(), 0, 5 * ALIGNMENT)) == [StageStopped(part())]


def test_grant_of_an_unknown_part_is_answered_with_a_stop() -> None:
    assert Prefill().receive(StageGrant(part(), 0, 0)) == [StageStopped(part())]
