"""Senders and a receiver over a channel that loses, repeats and reorders, with aborts and restarts at any moment.

The world has a memory: writes change it while they run, and some change it after they were reported as failed.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdserve.transfer.plan.copy_runs import PlanError
from pdserve.transfer.plan.ring import ALIGNMENT, Region, StagingRing
from pdserve.transfer.protocol.messages import (
    HeadSlice,
    InstanceId,
    StageArrived,
    StageFree,
    StageGrant,
    StageMessage,
    StagePart,
    StageRequest,
    StageStopped,
    TransferKey,
)
from pdserve.transfer.staging.receiver import (
    BadRequest,
    PagesQuiet,
    Post,
    ReceiverEffect,
    ScatterPart,
    StageReceiver,
    TransferLanded,
)
from pdserve.transfer.staging.sender import (
    PartFailed,
    PeerRing,
    SenderEffect,
    StageSender,
    WritePart,
    WriterStopped,
    split_tokens,
)

CELL_BYTES = 128  # two cells fill a unit of the ring
QUARANTINE_S = 5.0
RESEND_S = 1.0
RANK = 3
BLOCKS = {  # of two prefill servers, with one and with two ranks
    0: ((0, HeadSlice(0, 1, 0, 2)),),
    1: ((0, HeadSlice(0, 1, 0, 1)), (1, HeadSlice(0, 1, 1, 2))),
}


@dataclasses.dataclass(frozen=True)
class Abort:
    key: TransferKey


@dataclasses.dataclass(frozen=True)
class WritersStopped:
    """What the pair's connection tells decode, exactly once: AbortAck or TransferFailed."""

    key: TransferKey
    late_writes: bool


@dataclasses.dataclass(frozen=True)
class Packet:
    """On its way between a prefill instance and the decode server, in either direction."""

    instance: InstanceId
    to_decode: bool
    message: StageMessage | Abort | WritersStopped

    @property
    def losable(self) -> bool:
        """Aborts and their answers are left to the pair's connection, which delivers them."""
        return not isinstance(self.message, Abort | WritersStopped)


@dataclasses.dataclass
class Write:
    """A write into the ring, of which any part may have landed."""

    part: StagePart
    offset: int
    size_bytes: int
    instance: InstanceId
    ends_at: float | None = None
    """None while its engine runs; afterwards, when the last byte of a failed write has landed or is lost."""

    @property
    def units(self) -> range:
        return range(self.offset // ALIGNMENT, -(-(self.offset + self.size_bytes) // ALIGNMENT))


@dataclasses.dataclass
class Transfer:
    """What the two schedulers know."""

    key: TransferKey
    server: int
    instance: InstanceId
    tokens: range
    unasked: list[StagePart]
    uncomputed: list[StagePart]
    open: bool = True
    landed: bool = False
    quiet: bool = False
    aborted_by_prefill: bool = False
    broken: bool = False
    """Somebody gave it up, or a write of it failed. All others must land."""


def bytes_of(part: StagePart) -> int:
    return part.tokens * part.block.cells * CELL_BYTES


def units(region: Region) -> range:
    return range(region.offset // ALIGNMENT, (region.offset + region.size_bytes) // ALIGNMENT)


class Simulator(RuleBasedStateMachine):
    @initialize(capacity=st.integers(2, 8))
    def start(self, capacity: int) -> None:
        self.now = 0.0
        self.capacity = capacity
        self.instances = itertools.count()
        self.packets: list[Packet] = []
        self.senders: dict[InstanceId, StageSender] = {}
        self.servers: dict[int, InstanceId] = {}
        self.epoch = 0
        self.start_decode()

    def start_decode(self) -> None:
        self.epoch += 1
        self.key_numbers = itertools.count(1)  # a restarted decode server uses the same keys again
        ring: StagingRing[StagePart] = StagingRing(self.capacity * ALIGNMENT, epoch=self.epoch)
        self.receiver = StageReceiver(RANK, ring, cell_bytes=CELL_BYTES, quarantine_s=QUARANTINE_S)
        self.memory: list[StagePart | None] = [None] * self.capacity
        self.writes: list[Write] = []
        self.scatters: dict[StagePart, Region] = {}
        self.scattered: set[StagePart] = set()
        self.computed: set[StagePart] = set()
        self.transfers: dict[TransferKey, Transfer] = {}
        for server in BLOCKS:
            self.connect(server, self.servers.get(server) or self.new_instance())

    def new_instance(self) -> InstanceId:
        return InstanceId(f"prefill-{next(self.instances)}")

    def connect(self, server: int, instance: InstanceId) -> None:
        self.servers[server] = instance
        ring = PeerRing(self.epoch, self.capacity * ALIGNMENT)
        self.senders[instance] = StageSender({RANK: ring}, resend_after_s=RESEND_S)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One thing that can happen now. What brings transfers on is listed more often than what breaks them."""
        moves: list[Callable[[st.DataObject], None]] = [self.wait_a_while]
        open_transfers = [transfer for transfer in self.transfers.values() if transfer.open]
        if len(open_transfers) < 4:
            moves += [self.dispatch] * 3
        if any(transfer.unasked for transfer in self.transfers.values()):
            moves += [self.ask] * 4
        if any(transfer.uncomputed for transfer in self.transfers.values()):
            moves += [self.compute] * 4
        if self.packets:
            moves += [self.deliver] * 12 + [self.repeat] * 2 + [self.lose]
        if self.writes:
            moves += [self.end_write] * 5 + [self.land_some] * 2
        if self.scatters:
            moves += [self.end_scatter] * 3
        if open_transfers:
            moves += [self.decode_aborts, self.prefill_aborts]
        moves += [self.restart]
        data.draw(st.sampled_from(moves))(data)

    def dispatch(self, data: st.DataObject) -> None:
        server, first = data.draw(st.sampled_from(sorted(BLOCKS))), data.draw(st.integers(0, 2))
        tokens = data.draw(st.integers(1, 12))
        key = TransferKey(next(self.key_numbers), 1)
        instance = self.servers[server]
        parts = []
        for writer, block in BLOCKS[server]:
            limit = data.draw(st.integers(1, self.capacity)) * ALIGNMENT
            for start, end in split_tokens(
                first, first + tokens, token_bytes=block.cells * CELL_BYTES, limit_bytes=limit
            ):
                parts.append(StagePart(self.epoch, key, writer, RANK, block, start, end))
        self.receiver.open(key, instance, first, first + tokens, BLOCKS[server])
        self.transfers[key] = Transfer(key, server, instance, range(first, first + tokens), [*parts], [*parts])

    def ask(self, data: st.DataObject) -> None:
        self.ask_next(data.draw(st.sampled_from([one for one in self.transfers.values() if one.unasked])))

    def ask_next(self, transfer: Transfer) -> None:
        part = transfer.unasked.pop(0)
        effects = self.senders[transfer.instance].request(part, bytes_of(part), self.now)
        self.carry_out(transfer.instance, effects)

    def compute(self, data: st.DataObject) -> None:
        """The next part of a transfer is computed; it may not have been asked for."""
        transfer = data.draw(st.sampled_from([one for one in self.transfers.values() if one.uncomputed]))
        if transfer.uncomputed[0] in transfer.unasked:
            self.ask_next(transfer)
        self.compute_next(transfer)

    def compute_next(self, transfer: Transfer) -> None:
        if transfer.uncomputed:
            part = transfer.uncomputed.pop(0)
            self.computed.add(part)
            self.carry_out(transfer.instance, self.senders[transfer.instance].computed(part))

    def end_write(self, data: st.DataObject) -> None:
        running = [write for write in self.writes if write.ends_at is None]
        if running:
            outcome = data.draw(st.sampled_from(["written", "written", "failed", "late"]))
            self.finish_write(data.draw(st.sampled_from(running)), outcome)

    def finish_write(self, write: Write, outcome: str) -> None:
        sender = self.senders[write.instance]
        if outcome == "late":
            write.ends_at = self.now + QUARANTINE_S
        else:
            self.writes.remove(write)
        if outcome == "written":
            self.land(write, write.units)
            self.carry_out(write.instance, sender.written(write.part, self.now))
        else:
            self.transfers[write.part.key].broken = True
            late = outcome == "late"
            self.carry_out(write.instance, sender.failed(write.part, "broken", self.now, late_writes=late))

    def land_some(self, data: st.DataObject) -> None:
        write = data.draw(st.sampled_from(self.writes))
        self.land(write, [data.draw(st.sampled_from(write.units))])

    def land(self, write: Write, where: Iterable[int]) -> None:
        for unit in where:
            self.memory[unit] = write.part

    def end_scatter(self, data: st.DataObject) -> None:
        self.finish_scatter(data.draw(st.sampled_from(sorted(self.scatters, key=str))))

    def finish_scatter(self, part: StagePart) -> None:
        region = self.scatters.pop(part)
        needed = -(-bytes_of(part) // ALIGNMENT)
        found = self.memory[region.offset // ALIGNMENT :][:needed]
        assert found == [part] * needed, "the region holds another part's bytes"
        self.scattered.add(part)
        self.obey(self.receiver.scattered(part))

    def decode_aborts(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from([one for one in self.transfers.values() if one.open]))
        transfer.broken = True
        self.close(transfer.key, tell=True)

    def close(self, key: TransferKey, *, tell: bool) -> None:
        transfer = self.transfers[key]
        if transfer.open:
            transfer.open = False
            self.obey(self.receiver.close(key))
            if tell:
                self.packets.append(Packet(transfer.instance, False, Abort(key)))

    def prefill_aborts(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(list(self.transfers.values())))
        transfer.broken = True
        self.abort_on_prefill(transfer.key)

    def abort_on_prefill(self, key: TransferKey) -> None:
        transfer = self.transfers[key]
        transfer.unasked, transfer.uncomputed = [], []
        if self.servers[transfer.server] == transfer.instance and not transfer.aborted_by_prefill:
            transfer.aborted_by_prefill = True
            self.carry_out(transfer.instance, self.senders[transfer.instance].abort(key, self.now))

    def restart(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from([*BLOCKS, "decode", *["nobody"] * 3]))
        if who == "decode":
            # Stage messages of both directions may still arrive; the connection's own and writes do not.
            self.packets = [packet for packet in self.packets if packet.losable]
            self.start_decode()
        elif isinstance(who, int):
            self.restart_prefill(who)

    def restart_prefill(self, server: int) -> None:
        """Its writes end with it; what its kernel had taken may land for a while."""
        old = self.servers[server]
        del self.senders[old]
        for write in self.writes:
            if write.instance == old and write.ends_at is None:
                write.ends_at = self.now + QUARANTINE_S
        self.connect(server, self.new_instance())
        self.obey(self.receiver.peer_closed(old, self.now))
        for transfer in self.transfers.values():
            if transfer.instance == old:
                transfer.unasked, transfer.uncomputed = [], []
                transfer.broken = True
                self.close(transfer.key, tell=False)

    def deliver(self, data: st.DataObject) -> None:
        self.receive(self.packets.pop(data.draw(st.integers(0, len(self.packets) - 1))))

    def repeat(self, data: st.DataObject) -> None:
        self.receive(data.draw(st.sampled_from(self.packets)))

    def lose(self, data: st.DataObject) -> None:
        losable = [packet for packet in self.packets if packet.losable]
        if losable:
            self.packets.remove(data.draw(st.sampled_from(losable)))

    def wait_a_while(self, data: st.DataObject) -> None:
        self.wait(data.draw(st.sampled_from([0.5, 1.5, 6.0])))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.writes = [write for write in self.writes if write.ends_at is None or write.ends_at > self.now]
        self.obey(self.receiver.due(self.now))
        for instance, sender in list(self.senders.items()):
            self.carry_out(instance, sender.due(self.now))

    def receive(self, packet: Packet) -> None:
        message, instance = packet.message, packet.instance
        if packet.to_decode:
            match message:
                case StageRequest():
                    self.obey(self.receiver.requested(instance, message))
                case StageArrived():
                    self.obey(self.receiver.arrived(instance, message))
                case StageStopped():
                    self.obey(self.receiver.stopped(instance, message, self.now))
                case WritersStopped():
                    self.obey(self.receiver.writer_stopped(message.key, self.now, late_writes=message.late_writes))
                    self.close(message.key, tell=False)
                case _:
                    raise AssertionError(message)
        elif instance in self.senders:
            sender = self.senders[instance]
            match message:
                case StageGrant():
                    self.carry_out(instance, sender.granted(message, self.now))
                case StageFree():
                    self.carry_out(instance, sender.freed(message))
                case Abort():
                    self.abort_on_prefill(message.key)
                case _:
                    raise AssertionError(message)

    def carry_out(self, instance: InstanceId, effects: Iterable[SenderEffect]) -> None:
        for effect in effects:
            match effect:
                case WritePart(part, offset, size_bytes):
                    assert part in self.computed, "written before it was computed"
                    assert part not in self.scattered, "written after it was scattered"
                    assert all(write.part != part for write in self.writes), "written twice"
                    self.writes.append(Write(part, offset, size_bytes, instance))
                case WriterStopped(key, late_writes):
                    running = [write for write in self.writes if write.part.key == key and write.ends_at is None]
                    assert not running, "said to have stopped while it writes"
                    self.packets.append(Packet(instance, True, WritersStopped(key, late_writes)))
                case PartFailed(part, reason):
                    assert self.transfers[part.key].broken, reason
                    self.abort_on_prefill(part.key)
                case message:
                    self.packets.append(Packet(instance, True, message))

    def obey(self, effects: Iterable[ReceiverEffect]) -> None:
        for effect in effects:
            match effect:
                case Post(instance, message):
                    self.packets.append(Packet(instance, False, message))
                case ScatterPart(part, region):
                    assert part not in self.scatters, "scattered twice"
                    assert part not in self.scattered, "scattered twice"
                    assert not self.transfers[part.key].quiet, "scattered into pages of a new owner"
                    self.scatters[part] = region
                case TransferLanded(key):
                    transfer = self.transfers[key]
                    assert not transfer.landed
                    transfer.landed = True
                    self.check_landed(key)
                    self.close(key, tell=False)
                case PagesQuiet(key):
                    assert not self.transfers[key].quiet, "said twice"
                    assert all(part.key != key for part in self.scatters), "said while a scatter runs"
                    self.transfers[key].quiet = True
                case BadRequest():
                    raise AssertionError(effect)

    def check_landed(self, key: TransferKey) -> None:
        transfer = self.transfers[key]
        for writer, block in BLOCKS[transfer.server]:
            tokens = [
                token
                for part in self.scattered
                if (part.key, part.writer, part.block) == (key, writer, block)
                for token in range(part.token_start, part.token_end)
            ]
            assert sorted(tokens) == list(transfer.tokens)

    @invariant()
    def memory_is_safe(self) -> None:
        """Whatever may still be written lies in a region that is its part's own."""
        if not hasattr(self, "receiver"):
            return
        self.receiver.check_integrity()
        held = {
            unit: incoming.part
            for incoming in self.receiver._parts.values()
            if incoming.region is not None
            for unit in units(incoming.region)
        }
        for write in self.writes:
            for unit in write.units:
                assert held.get(unit) == write.part, "a region was freed under its writer"

    def teardown(self) -> None:
        """The channel heals and everybody goes on: every transfer ends, and nothing is left of it."""
        if not hasattr(self, "receiver"):
            return
        for _ in range(400):
            while self.packets:
                self.receive(self.packets.pop(0))
            for transfer in list(self.transfers.values()):
                while transfer.unasked:
                    self.ask_next(transfer)
                while transfer.uncomputed:
                    self.compute_next(transfer)
            for write in [write for write in self.writes if write.ends_at is None]:
                self.finish_write(write, "written")
            for part in list(self.scatters):
                self.finish_scatter(part)
            self.wait(0.5)
            if self.receiver.idle and not self.packets and all(sender.idle for sender in self.senders.values()):
                break
        assert self.receiver.idle, "a transfer or a region is left"
        assert all(sender.idle for sender in self.senders.values()), "a part is left"
        assert self.receiver.ring.idle
        assert all(transfer.quiet and not transfer.open for transfer in self.transfers.values())
        assert all(transfer.landed or transfer.broken for transfer in self.transfers.values())


Simulator.TestCase.settings = settings(max_examples=120, stateful_step_count=80, deadline=None)
TestWorld = Simulator.TestCase

PREFILL = InstanceId("prefill")
KEY = TransferKey(7, 1)
BLOCK = HeadSlice(0, 2, 0, 1)


def part(start: int = 0, end: int = 4, *, writer: int = 0, epoch: int = 9, key: TransferKey = KEY) -> StagePart:
    return StagePart(epoch, key, writer, RANK, BLOCK, start, end)


def request(of: StagePart) -> StageRequest:
    return StageRequest(of, bytes_of(of))


@pytest.fixture
def receiver() -> StageReceiver:
    """A ring of 8 units, a transfer of 8 tokens of one block from ranks 0 and 1; a token takes a unit."""
    made = StageReceiver(RANK, StagingRing(8 * ALIGNMENT, epoch=9), cell_bytes=CELL_BYTES, quarantine_s=QUARANTINE_S)
    made.open(KEY, PREFILL, 0, 8, [(0, BLOCK), (1, BLOCK)])
    return made


def grant_of(effects: list[ReceiverEffect]) -> StageGrant:
    (post,) = effects
    assert isinstance(post, Post)
    assert isinstance(post.message, StageGrant)
    return post.message


def test_one_part_from_request_to_free(receiver: StageReceiver) -> None:
    sender = StageSender({RANK: PeerRing(9, 8 * ALIGNMENT)})
    (asked,) = sender.request(part(), 4 * ALIGNMENT, 0.0)
    assert asked == request(part())
    grant = grant_of(receiver.requested(PREFILL, asked))
    assert sender.granted(grant, 0.0) == []
    assert sender.computed(part()) == [WritePart(part(), 0, 4 * ALIGNMENT)]
    (arrived,) = sender.written(part(), 1.0)
    assert arrived == StageArrived(part(), grant.region)
    (scatter,) = receiver.arrived(PREFILL, arrived)
    assert scatter == ScatterPart(part(), Region(receiver.ring._live[0].position, 0, 4 * ALIGNMENT))
    assert receiver.arrived(PREFILL, arrived) == []
    assert receiver.requested(PREFILL, asked) == []
    assert receiver.scattered(part()) == [Post(PREFILL, StageFree(part()))]
    assert receiver.arrived(PREFILL, arrived) == [Post(PREFILL, StageFree(part()))]
    assert receiver.requested(PREFILL, asked) == [Post(PREFILL, StageFree(part()))]
    assert not sender.idle
    assert sender.freed(StageFree(part())) == []
    assert sender.idle
    assert receiver.ring.idle


def test_landed_when_the_last_of_all_writers_is_scattered(receiver: StageReceiver) -> None:
    parts = [part(0, 4), part(4, 8), part(0, 4, writer=1), part(4, 8, writer=1)]
    effects: list[ReceiverEffect] = []
    for one in parts:
        grant = grant_of(receiver.requested(PREFILL, request(one)))
        receiver.arrived(PREFILL, StageArrived(one, grant.region))
        assert TransferLanded(KEY) not in effects
        effects = receiver.scattered(one)
    assert effects == [Post(PREFILL, StageFree(parts[-1])), TransferLanded(KEY)]
    assert receiver.close(KEY) == [PagesQuiet(KEY)]
    assert receiver.idle


def test_a_lost_grant_is_given_again_and_no_second_region(receiver: StageReceiver) -> None:
    sender = StageSender({RANK: PeerRing(9, 8 * ALIGNMENT)}, resend_after_s=RESEND_S)
    sender.request(part(), 4 * ALIGNMENT, 0.0)
    first = grant_of(receiver.requested(PREFILL, request(part())))
    assert sender.due(0.9) == []
    (again,) = sender.due(1.0)
    assert again == request(part())
    assert sender.due(1.9) == []
    assert grant_of(receiver.requested(PREFILL, request(part()))) == first
    assert receiver.ring.granted_bytes == 4 * ALIGNMENT


@pytest.mark.parametrize("ending", ["written", "failed", "aborted"])
def test_the_last_word_is_said_again_until_decode_calls_the_part_over(receiver: StageReceiver, ending: str) -> None:
    """However often it is lost, or the answer to it."""
    sender = StageSender({RANK: PeerRing(9, 8 * ALIGNMENT)}, resend_after_s=RESEND_S)
    sender.request(part(), 4 * ALIGNMENT, 0.0)
    sender.granted(grant_of(receiver.requested(PREFILL, request(part()))), 0.0)
    if ending == "aborted":
        word, _ = sender.abort(KEY, 0.0)
    else:
        sender.computed(part())
        failed = ending == "failed"
        *_, word = sender.failed(part(), "", 0.0, late_writes=False) if failed else sender.written(part(), 0.0)
    for turn in (1.0, 2.0, 3.0):
        assert sender.due(turn - 0.1) == []
        assert sender.due(turn) == [word]

    def tell() -> list[ReceiverEffect]:
        if isinstance(word, StageArrived):
            return receiver.arrived(PREFILL, word)
        assert isinstance(word, StageStopped)
        return receiver.stopped(PREFILL, word, 3.0)

    over = [Post(PREFILL, StageFree(part()))]
    if ending == "written":
        assert len(tell()) == 1
        assert receiver.scattered(part()) == over
    else:
        assert tell() == over
    assert receiver.ring.idle
    assert sender.due(4.0) == [word]
    assert tell() == over, "the answer was lost, and is given again"
    assert sender.freed(StageFree(part())) == []
    assert sender.due(9.0) == []


def test_a_request_that_its_own_end_overtook_is_not_granted(receiver: StageReceiver) -> None:
    over = [Post(PREFILL, StageFree(part()))]
    assert receiver.stopped(PREFILL, StageStopped(part()), 0.0) == over
    assert receiver.requested(PREFILL, request(part())) == over
    assert receiver.ring.idle


def test_a_stopped_request_leaves_the_queue_to_the_next(receiver: StageReceiver) -> None:
    grant_of(receiver.requested(PREFILL, request(part(0, 4))))
    assert receiver.requested(PREFILL, request(part(0, 8, writer=1))) == []
    assert receiver.requested(PREFILL, request(part(4, 8))) == []
    free, grant = receiver.stopped(PREFILL, StageStopped(part(0, 8, writer=1)), 0.0)
    assert free == Post(PREFILL, StageFree(part(0, 8, writer=1)))
    assert grant_of([grant]).part == part(4, 8)


def test_a_region_waits_for_its_writer_after_an_abort(receiver: StageReceiver) -> None:
    grant_of(receiver.requested(PREFILL, request(part(0, 8))))
    assert receiver.requested(PREFILL, request(part(0, 8, writer=1))) == []
    assert receiver.close(KEY) == [PagesQuiet(KEY)]  # pages are safe at once: only we write them
    assert receiver.due(1e9) == []
    assert receiver.ring.granted_bytes == 8 * ALIGNMENT
    assert receiver.writer_stopped(KEY, 2.0, late_writes=False) == [Post(PREFILL, StageFree(part(0, 8)))]
    assert receiver.ring.idle


def test_late_writes_are_waited_for_whatever_is_said_afterwards(receiver: StageReceiver) -> None:
    grant_of(receiver.requested(PREFILL, request(part())))
    receiver.stopped(PREFILL, StageStopped(part(), late_writes=True), 10.0)
    receiver.writer_stopped(KEY, 11.0, late_writes=False)
    receiver.peer_closed(PREFILL, 12.0)
    assert receiver.due(14.9) == []
    assert receiver.due(15.0) == [Post(PREFILL, StageFree(part()))]


def test_silence_frees_nothing_and_a_closed_connection_does_after_a_while(receiver: StageReceiver) -> None:
    grant_of(receiver.requested(PREFILL, request(part())))
    receiver.close(KEY)
    assert receiver.due(1e6) == []
    assert receiver.peer_closed(PREFILL, 1e6) == []
    assert receiver.due(1e6 + QUARANTINE_S) == [Post(PREFILL, StageFree(part()))]


def test_a_writer_that_stopped_gets_no_grants_for_what_it_had_queued(receiver: StageReceiver) -> None:
    grant_of(receiver.requested(PREFILL, request(part(0, 8))))
    receiver.requested(PREFILL, request(part(0, 8, writer=1)))
    assert receiver.writer_stopped(KEY, 0.0, late_writes=False) == [
        Post(PREFILL, StageFree(part(0, 8))),
        Post(PREFILL, StageFree(part(0, 8, writer=1))),
    ]
    assert receiver.ring.idle


def test_an_aborted_scatter_is_waited_for(receiver: StageReceiver) -> None:
    grant = grant_of(receiver.requested(PREFILL, request(part())))
    receiver.arrived(PREFILL, StageArrived(part(), grant.region))
    assert receiver.close(KEY) == []
    assert receiver.writer_stopped(KEY, 0.0, late_writes=False) == []
    assert receiver.scattered(part()) == [Post(PREFILL, StageFree(part())), PagesQuiet(KEY)]


def test_abort_of_a_running_write_answers_when_it_has_ended() -> None:
    sender = StageSender({RANK: PeerRing(9, 8 * ALIGNMENT)})
    for one in (part(0, 4), part(4, 8)):
        sender.request(one, 4 * ALIGNMENT, 0.0)
        sender.computed(one)
    assert sender.granted(StageGrant(part(0, 4), 0, 0), 0.0) == [WritePart(part(0, 4), 0, 4 * ALIGNMENT)]
    assert sender.abort(KEY, 1.0) == [StageStopped(part(4, 8))]
    assert sender.granted(StageGrant(part(4, 8), 1024, 1024), 1.0) == []
    assert sender.failed(part(0, 4), "cancelled", 2.0, late_writes=True) == [
        StageStopped(part(0, 4), late_writes=True),
        WriterStopped(KEY, late_writes=True),
    ]


def test_the_last_word_for_a_transfer_counts_late_writes_from_before_the_abort() -> None:
    sender = StageSender({RANK: PeerRing(9, 8 * ALIGNMENT)})
    sender.request(part(), 4 * ALIGNMENT, 0.0)
    sender.computed(part())
    sender.granted(StageGrant(part(), 0, 0), 0.0)
    assert PartFailed(part(), "broken") in sender.failed(part(), "broken", 1.0, late_writes=True)
    assert sender.abort(KEY, 2.0) == [WriterStopped(KEY, late_writes=True)]


def test_messages_of_an_earlier_ring_change_nothing(receiver: StageReceiver) -> None:
    """A restarted decode server counts its transfers from the start: names repeat, the epoch does not."""
    grant_of(receiver.requested(PREFILL, request(part())))
    old = part(epoch=8)
    for effects in (
        receiver.requested(PREFILL, request(old)),
        receiver.arrived(PREFILL, StageArrived(old, 0)),
        receiver.stopped(PREFILL, StageStopped(old), 0.0),
    ):
        assert effects == [Post(PREFILL, StageFree(old))]
    assert receiver.ring.granted_bytes == 4 * ALIGNMENT
    assert grant_of(receiver.requested(PREFILL, request(part()))).offset == 0


def test_another_peer_cannot_speak_for_a_part(receiver: StageReceiver) -> None:
    grant = grant_of(receiver.requested(PREFILL, request(part())))
    other = InstanceId("other")
    assert receiver.arrived(other, StageArrived(part(), grant.region)) == []
    assert receiver.stopped(other, StageStopped(part()), 0.0) == []
    assert receiver.requested(other, request(part())) == []
    assert receiver.requested(other, request(part(4, 8))) == [Post(other, StageFree(part(4, 8)))]
    assert receiver.ring.granted_bytes == 4 * ALIGNMENT


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (request(part(6, 9)), r"tokens \[0, 8\)"),
        (request(part(6, 6)), r"tokens \[0, 8\)"),
        (request(part(2, 6)), "overlaps"),
        (request(part(writer=2)), "rank 2 does not write"),
        (StageRequest(part(4, 8), 4 * ALIGNMENT + 1), "asks for 1025 bytes"),
    ],
)
def test_a_request_that_is_not_of_the_transfer_is_refused(
    receiver: StageReceiver, message: StageRequest, reason: str
) -> None:
    grant_of(receiver.requested(PREFILL, request(part())))
    refused, answer = receiver.requested(PREFILL, message)
    assert isinstance(refused, BadRequest)
    assert re.search(reason, refused.reason)
    assert answer == Post(PREFILL, StageFree(message.part))
    assert receiver.ring.granted_bytes == 4 * ALIGNMENT


def test_a_grant_outside_the_ring_is_refused() -> None:
    sender = StageSender({RANK: PeerRing(9, 8 * ALIGNMENT)})
    sender.request(part(), 4 * ALIGNMENT, 0.0)
    sender.computed(part())
    failed, stopped = sender.granted(StageGrant(part(), 0, 5 * ALIGNMENT), 0.0)
    assert isinstance(failed, PartFailed)
    assert stopped == StageStopped(part())


def test_a_part_that_no_ring_holds_is_refused() -> None:
    sender = StageSender({RANK: PeerRing(9, 8 * ALIGNMENT)})
    with pytest.raises(PlanError, match="a ring of 2048 bytes"):
        sender.request(part(), 9 * ALIGNMENT, 0.0)
    with pytest.raises(PlanError, match="no ring"):
        sender.request(StagePart(9, KEY, 0, RANK + 1, BLOCK, 0, 4), 1, 0.0)


@pytest.mark.parametrize(("start", "end", "limit"), [(0, 10, 4), (3, 4, 1), (5, 5, 1), (0, 9, 3), (7, 1007, 64)])
def test_split_covers_the_chunk_in_parts_within_the_limit(start: int, end: int, limit: int) -> None:
    parts = split_tokens(start, end, token_bytes=100, limit_bytes=100 * limit + 99)
    assert [token for first, last in parts for token in range(first, last)] == list(range(start, end))
    assert len(parts) == -(-(end - start) // limit)
    assert all(0 < last - first <= limit for first, last in parts)


def test_a_token_larger_than_the_limit_cannot_be_split() -> None:
    with pytest.raises(PlanError, match="one token takes 100 bytes"):
        split_tokens(0, 1, token_bytes=100, limit_bytes=99)
