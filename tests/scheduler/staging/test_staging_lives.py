"""Both sides of staging with aborts, restarts and new connections at any time.

A connection delivers its messages once and in order, and ends with any of them undelivered.

The simulator has a memory: writes change it while they run, and some change it after they were reported as failed.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator, PageGrant
from pdserve.scheduler.decode.memory.holds import Holds
from pdserve.scheduler.decode.rooms.staging import RankRing, StagedArrivals
from pdserve.scheduler.messages.effects import Effect, SendToPeer
from pdserve.scheduler.prefill.staging import StagedSends
from pdserve.transfer.data.chunks import ChunkWrite, ChunkWritten, PartScatter, PartWrite, PartWritten
from pdserve.transfer.plan.copy_regions import CopyRegion
from pdserve.transfer.plan.ring import ALIGNMENT, StagingRing
from pdserve.transfer.plan.staged_regions import StagedRegion
from pdserve.transfer.protocol.messages import (
    InstanceId,
    PrefillDone,
    StageArrived,
    StageFree,
    StageGrant,
    StageMessage,
    StagePart,
    StageRequest,
    StageRing,
    StageStopped,
    TransferKey,
)
from tests.examples import examples

CELL_BYTES = 128  # two cells fill a unit of the ring
QUARANTINE_S = 5.0
RANKS = 2
REGIONS = {  # of two prefill servers, with one rank and with two
    0: (CopyRegion(0, 1, range(1), range(2)),),
    1: (
        CopyRegion(0, 1, range(1), range(1)),
        CopyRegion(1, 1, range(1), range(1, 2)),
        CopyRegion(0, 0, range(1), range(1)),
    ),
}
MOST_REGIONS = 3
MOST_TOKENS = 14


@dataclasses.dataclass(frozen=True)
class Abort:
    key: TransferKey


@dataclasses.dataclass(frozen=True)
class WritersStopped:
    """AbortAck or TransferFailed."""

    key: TransferKey
    late_writes: bool


@dataclasses.dataclass(frozen=True)
class Packet:
    """A message between a prefill instance and the decode server, in either direction."""

    instance: InstanceId
    to_decode: bool
    message: StageMessage | Abort | WritersStopped | PrefillDone

    @property
    def channel(self) -> tuple[InstanceId, bool]:
        return self.instance, self.to_decode


@dataclasses.dataclass
class Write:
    """A write into a ring, of which any bytes may have landed."""

    command: PartWrite
    instance: InstanceId
    ends_at: float | None = None
    """None while its engine runs; after a failure, the time when its last byte has landed or is lost."""
    fails_at: float = math.inf
    """When its engine gives up, because the connection of its server has ended."""

    @property
    def part(self) -> StagePart:
        return self.command.part

    @property
    def units(self) -> range:
        return units(self.command.offset, self.command.size_bytes)


@dataclasses.dataclass
class Transfer:
    """A transfer, as the two schedulers see it."""

    key: TransferKey
    server: int
    instance: InstanceId
    tokens: range
    unrequested: list[range]
    uncomputed: list[range]
    sending: int = 0
    """Chunks that are computed and have not ended."""
    late_writes: bool = False
    open: bool = True
    landed: bool = False
    prefill_ended: bool = False
    """Prefill has sent PrefillDone or stopped, or was killed."""
    aborted_by_prefill: bool = False
    broken: bool = False
    """It was aborted, or a write of it failed. All other transfers must land."""


def is_to(effect: Effect, instance: InstanceId) -> bool:
    return isinstance(effect, SendToPeer) and effect.instance == instance


def units(offset: int, size_bytes: int) -> range:
    return range(offset // ALIGNMENT, -(-(offset + size_bytes) // ALIGNMENT))


class StagingLives(RuleBasedStateMachine):
    @initialize(
        capacity=st.integers(2, 8), part_units=st.lists(st.integers(1, 8), min_size=MOST_REGIONS, max_size=MOST_REGIONS)
    )
    def start(self, capacity: int, part_units: list[int]) -> None:
        self.now = 0.0
        self.capacity = capacity
        self.part_units = [min(count, capacity) for count in part_units]
        self.instances = itertools.count()
        self.packets: list[Packet] = []
        self.senders: dict[InstanceId, StagedSends] = {}
        self.effects: dict[InstanceId, list[Effect]] = {}
        self.servers: dict[int, InstanceId] = {}
        self.direct_writes: list[tuple[InstanceId, ChunkWrite]] = []
        self.writes: list[Write] = []
        self.transfers: dict[TransferKey, Transfer] = {}
        self.epoch = 0
        self.start_decode()
        for server in REGIONS:
            self.start_prefill(server)

    def start_decode(self) -> None:
        self.epoch += 1
        self.decode = InstanceId(f"decode-{self.epoch}")
        self.key_numbers = itertools.count(1)  # a restarted decode server uses the same keys again
        self.decode_effects: list[Effect] = []
        rings = [RankRing(StagingRing(self.capacity * ALIGNMENT), cell_bytes=CELL_BYTES) for _ in range(RANKS)]
        self.allocator = PageAllocator[KvPage](MOST_TOKENS)
        self.allocator.grant("all, so that transfers can share them", MOST_TOKENS)
        self.grants: dict[TransferKey, PageGrant[KvPage]] = {}
        commands = Holds(self.allocator)
        self.done: set[TransferKey] = set()
        """Transfers of which prefill has written everything."""
        self.receiver = StagedArrivals(rings, 1, QUARANTINE_S, collections.Counter(), self.decode_effects, commands)
        self.memory: list[list[StagePart | None]] = [[None] * self.capacity for _ in range(RANKS)]
        self.scatters: dict[StagePart, PartScatter] = {}
        self.scattered: set[StagePart] = set()
        self.computed: set[tuple[TransferKey, int]] = set()
        self.transfers = {}

    def start_prefill(self, server: int) -> None:
        instance = self.servers[server] = InstanceId(f"prefill-{next(self.instances)}")
        effects: list[Effect] = []
        self.effects[instance] = effects
        self.senders[instance] = StagedSends(1, collections.Counter(), effects)
        self.connect(server)

    def connect(self, server: int) -> None:
        ring = StageRing(0, self.capacity * ALIGNMENT, self.epoch)
        staged = [
            StagedRegion(region, ring, len(region.heads) * CELL_BYTES, count * ALIGNMENT)
            for region, count in zip(REGIONS[server], self.part_units, strict=False)
        ]
        self.senders[self.servers[server]].regions[self.decode] = staged
        self.receiver.peer_up(self.servers[server], staged)

    # -- moves -------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One event that is possible now. Progress is listed more often than failures."""
        moves: list[Callable[[st.DataObject], None]] = [self.wait_a_while]
        open_transfers = [transfer for transfer in self.transfers.values() if transfer.open]
        if len(open_transfers) < 4:
            moves += [self.dispatch] * 3
        if any(transfer.unrequested for transfer in self.transfers.values()):
            moves += [self.request] * 4
        if any(transfer.uncomputed for transfer in self.transfers.values()):
            moves += [self.compute] * 4
        if self.packets:
            moves += [self.deliver] * 12
        if self.writes:
            moves += [self.end_write] * 5 + [self.land_some] * 2
        if self.direct_writes:
            moves += [self.end_direct_write] * 3
        if self.scatters:
            moves += [self.end_scatter] * 3
        if open_transfers:
            moves += [self.decode_aborts, self.prefill_aborts]
        moves += [self.restart, self.reconnect]
        data.draw(st.sampled_from(moves))(data)
        self.act()

    def dispatch(self, data: st.DataObject) -> None:
        server, first = data.draw(st.sampled_from(sorted(REGIONS))), data.draw(st.integers(0, 2))
        tokens = range(first, first + data.draw(st.integers(1, 12)))
        chunk = data.draw(st.integers(1, 12))
        chunks = [range(start, min(start + chunk, tokens.stop)) for start in tokens[::chunk]]
        key = TransferKey(next(self.key_numbers), 1)
        instance = self.servers[server]
        grant = self.allocator.grant(str(key), 0, shared=[KvPage(token) for token in range(tokens.stop)])
        assert grant is not None
        self.grants[key] = grant
        self.receiver.open(key, instance, tokens.start, tokens.stop, grant)
        self.transfers[key] = Transfer(key, server, instance, tokens, [*chunks], [*chunks])

    def request(self, data: st.DataObject) -> None:
        self.request_next(data.draw(st.sampled_from([one for one in self.transfers.values() if one.unrequested])))

    def request_next(self, transfer: Transfer) -> None:
        chunk = transfer.unrequested.pop(0)
        self.senders[transfer.instance].request((self.decode, transfer.key), chunk.start, chunk.stop)

    def compute(self, data: st.DataObject) -> None:
        """The next chunk of a transfer is computed; its regions may not have been requested."""
        self.compute_next(data.draw(st.sampled_from([one for one in self.transfers.values() if one.uncomputed])))

    def compute_next(self, transfer: Transfer) -> None:
        chunk = transfer.uncomputed.pop(0)
        if chunk in transfer.unrequested:
            transfer.unrequested.remove(chunk)
        transfer.sending += 1
        self.computed |= {(transfer.key, token) for token in chunk}
        write = ChunkWrite(self.decode, transfer.key, chunk.start, chunk.stop, list(chunk), list(chunk))
        self.direct_writes.append((transfer.instance, write))
        self.senders[transfer.instance].send(write)

    def end_direct_write(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.direct_writes) - 1))
        self.finish_direct_write(index, ok=data.draw(st.sampled_from([True, True, True, False])))

    def finish_direct_write(self, index: int, *, ok: bool) -> None:
        instance, write = self.direct_writes.pop(index)
        if not ok and write.instance == self.decode:
            self.transfers[write.key].broken = True
        ended = ChunkWritten(write.instance, write.key, write.token_start, write.token_end, ok, "" if ok else "broken")
        self.writes_ended(instance, write.instance, write.key, self.senders[instance].chunk_written(ended), ok=ok)

    def end_write(self, data: st.DataObject) -> None:
        running = [write for write in self.writes if write.ends_at is None]
        if running:
            outcome = data.draw(st.sampled_from(["written", "written", "failed", "late"]))
            self.finish_write(data.draw(st.sampled_from(running)), outcome)

    def finish_write(self, write: Write, outcome: str) -> None:
        ok, late = outcome == "written", outcome == "late"
        if late:
            write.ends_at = self.now + QUARANTINE_S
        else:
            self.writes.remove(write)
        if ok:
            self.land(write, write.units)
        elif self.is_current(write):
            self.transfers[write.part.key].broken = True
        written = PartWritten(write.command.instance, write.part, ok, "" if ok else "broken", late, 1, 1)
        chunk = self.senders[write.instance].part_written(written)
        self.writes_ended(write.instance, write.command.instance, write.part.key, chunk, ok=ok)

    def writes_ended(
        self, prefill: InstanceId, decode: InstanceId, key: TransferKey, chunk: ChunkWritten | None, *, ok: bool
    ) -> None:
        """As the transitions of prefill do: count the chunk, and stop the transfer after a failure."""
        transfer = self.transfers.get(key) if decode == self.decode else None
        if transfer is None:
            return
        if transfer.instance == prefill and chunk is not None:
            self.chunk_ended(transfer, chunk)
        if not ok:
            assert transfer.broken
            self.abort_on_prefill(transfer)

    def is_current(self, write: Write) -> bool:
        """Whether a write goes to the running decode server and not to an earlier one."""
        return write.command.instance == self.decode

    def land_some(self, data: st.DataObject) -> None:
        write = data.draw(st.sampled_from(self.writes))
        self.land(write, [data.draw(st.sampled_from(write.units))])

    def land(self, write: Write, where: Iterable[int]) -> None:
        if self.is_current(write):
            for unit in where:
                self.memory[write.part.destination][unit] = write.part

    def end_scatter(self, data: st.DataObject) -> None:
        self.finish_scatter(data.draw(st.sampled_from(sorted(self.scatters, key=str))))

    def finish_scatter(self, part: StagePart) -> None:
        command = self.scatters.pop(part)
        found = {self.memory[part.destination][unit] for unit in units(command.offset, command.size_bytes)}
        assert found == {part}, "the region holds the bytes of another part"
        self.scattered.add(part)
        self.receiver.scattered(part)
        if part.key in self.done:
            self.finish_done(part.key)

    def finish_done(self, key: TransferKey) -> None:
        """Prefill has written everything: the transfer ends when it is all in its pages."""
        if self.transfers[key].open and not self.receiver.misses(key):
            self.finish_transfer(key)

    def finish_transfer(self, key: TransferKey) -> None:
        transfer = self.transfers[key]
        assert not transfer.landed
        transfer.landed = True
        self.check_landed(transfer)
        self.close(key, tell=False)

    def decode_aborts(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from([one for one in self.transfers.values() if one.open]))
        transfer.broken = True
        self.close(transfer.key, tell=True)

    def close(self, key: TransferKey, *, tell: bool) -> None:
        transfer = self.transfers[key]
        if transfer.open:
            transfer.open = False
            self.receiver.close(key)
            if tell:
                self.packets.append(Packet(transfer.instance, False, Abort(key)))

    def prefill_aborts(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(list(self.transfers.values())))
        transfer.broken = True
        self.abort_on_prefill(transfer)

    def abort_on_prefill(self, transfer: Transfer) -> None:
        transfer.unrequested, transfer.uncomputed = [], []
        if not transfer.prefill_ended and not transfer.aborted_by_prefill:
            transfer.aborted_by_prefill = True
            for chunk in self.senders[transfer.instance].stop((self.decode, transfer.key)):
                self.chunk_ended(transfer, chunk)

    def restart(self, data: st.DataObject) -> None:
        target = data.draw(st.sampled_from([*REGIONS, "decode", *["none"] * 3]))
        if target == "decode":
            self.restart_decode()
        elif isinstance(target, int):
            self.restart_prefill(target)

    def restart_decode(self) -> None:
        """Running writes report their end."""
        for transfer in self.transfers.values():
            self.abort_on_prefill(transfer)
        for sender in self.senders.values():
            del sender.regions[self.decode]
        for effects in self.effects.values():
            effects.clear()
        self.packets.clear()
        self.start_decode()
        for server in REGIONS:
            self.connect(server)

    def reconnect(self, data: st.DataObject) -> None:
        """A connection ends, and the same two instances pair again. What they send when they notice that is dropped, or
        sent over the new connection if they notice it late.
        """
        server, late = data.draw(st.sampled_from([*REGIONS])), data.draw(st.booleans())
        instance = self.servers[server]
        self.packets = [packet for packet in self.packets if packet.instance != instance]
        for transfer in self.transfers.values():
            if transfer.instance == instance:
                transfer.broken = True
                self.close(transfer.key, tell=late)
                self.abort_on_prefill(transfer)
                transfer.prefill_ended |= not transfer.sending
        self.receiver.peer_closed(instance, self.now)
        for write in self.writes:
            if write.instance == instance and self.is_current(write):
                write.fails_at = min(write.fails_at, self.now + QUARANTINE_S)
        if not late:
            self.effects[instance].clear()
            self.decode_effects[:] = [each for each in self.decode_effects if not is_to(each, instance)]
        self.connect(server)

    def restart_prefill(self, server: int) -> None:
        """Its writes end with it; bytes that its kernel had taken may land for a while."""
        old = self.servers[server]
        del self.senders[old], self.effects[old]
        self.direct_writes = [(instance, write) for instance, write in self.direct_writes if instance != old]
        for write in self.writes:
            if write.instance == old and write.ends_at is None:
                write.ends_at = self.now + QUARANTINE_S
        self.packets = [packet for packet in self.packets if packet.instance != old]
        self.receiver.peer_closed(old, self.now)
        self.start_prefill(server)
        for transfer in self.transfers.values():
            if transfer.instance == old:
                transfer.unrequested, transfer.uncomputed = [], []
                transfer.broken = transfer.prefill_ended = True
                self.close(transfer.key, tell=False)

    def deliver(self, data: st.DataObject) -> None:
        channel = data.draw(st.sampled_from(self.packets)).channel
        at = next(at for at, packet in enumerate(self.packets) if packet.channel == channel)
        self.receive(self.packets.pop(at))

    def wait_a_while(self, data: st.DataObject) -> None:
        self.wait(data.draw(st.sampled_from([0.5, 1.5, 6.0])))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for write in [write for write in self.writes if write.ends_at is None and write.fails_at <= self.now]:
            self.finish_write(write, "failed")
        self.writes = [write for write in self.writes if write.ends_at is None or write.ends_at > self.now]
        self.receiver.due(self.now)

    # -- messages and effects ----------------------------------------------------------------------------------

    def receive(self, packet: Packet) -> None:
        message, instance = packet.message, packet.instance
        if packet.to_decode:
            match message:
                case StageRequest() | StageArrived() | StageStopped():
                    assert self.receiver.receive(instance, message, self.now) is None
                case WritersStopped(key, late_writes):
                    self.receiver.writer_stopped(key, late_writes=late_writes, now=self.now)
                    self.close(key, tell=False)
                case PrefillDone(key=key):
                    self.done.add(key)
                    self.finish_done(key)
                case _:
                    raise AssertionError(message)
        elif instance in self.senders:
            match message:
                case StageGrant():
                    assert self.senders[instance].granted(self.decode, message) is None
                case StageFree():
                    pass
                case Abort(key):
                    self.abort_on_prefill(self.transfers[key])
                case _:
                    raise AssertionError(message)

    def act(self) -> None:
        """Carry out all effects. A chunk that failed aborts its transfer, which has effects of its own."""
        for effect in self.decode_effects:
            match effect:
                case SendToPeer(instance=instance, message=StageGrant() | StageFree() as answer):
                    self.packets.append(Packet(instance, False, answer))
                case PartScatter(part=part):
                    assert part not in self.scatters, "scattered twice"
                    assert part not in self.scattered, "scattered twice"
                    assert self.transfers[part.key].open, "scattered into pages that may have a new owner"
                    assert [*effect.pages] == [*range(part.token_start, part.token_end)]
                    self.scatters[part] = effect
                case _:
                    raise AssertionError(effect)
        self.decode_effects.clear()
        for instance, effects in self.effects.items():
            for effect in effects:
                match effect:
                    case SendToPeer(message=StageRequest() | StageArrived() | StageStopped() as message):
                        self.packets.append(Packet(instance, True, message))
                    case PartWrite(part=part):
                        assert {(part.key, token) for token in effect.pages} <= self.computed, "not computed"
                        assert part not in self.scattered, "written after it was scattered"
                        assert all(write.part != part for write in self.writes), "written twice"
                        self.writes.append(Write(effect, instance))
                    case _:
                        raise AssertionError(effect)
            effects.clear()
        for transfer in self.transfers.values():
            self.check_prefill_end(transfer)

    def chunk_ended(self, transfer: Transfer, ended: ChunkWritten) -> None:
        transfer.sending -= 1
        transfer.late_writes |= ended.late_writes

    def check_prefill_end(self, transfer: Transfer) -> None:
        """Prefill reports that a transfer is done, or has stopped, when all its chunks have ended."""
        if transfer.prefill_ended or transfer.sending or transfer.uncomputed:
            return
        running = [write for write in self.writes if write.part.key == transfer.key and write.ends_at is None]
        assert not any(map(self.is_current, running)), "reported as ended while it writes"
        transfer.prefill_ended = True
        message: WritersStopped | PrefillDone = WritersStopped(transfer.key, transfer.late_writes)
        if not transfer.aborted_by_prefill:
            message = PrefillDone(transfer.key, (), 0, 0, 0, 0, 0.0, 0.0, 0.0)
        self.packets.append(Packet(transfer.instance, True, message))

    # -- checks ------------------------------------------------------------------------------------------------

    def check_landed(self, transfer: Transfer) -> None:
        for region in REGIONS[transfer.server]:
            tokens = [
                token
                for part in self.scattered
                if (part.key, part.writer, part.destination) == (transfer.key, region.source, region.destination)
                if range(part.block.head_start, part.block.head_end) == region.heads
                for token in range(part.token_start, part.token_end)
            ]
            assert sorted(tokens) == list(transfer.tokens)

    @invariant()
    def memory_is_safe(self) -> None:
        """Every running or late write goes to a region that its part still holds."""
        if not hasattr(self, "receiver"):
            return
        self.receiver.check_integrity(idle=False)
        scattered_to = {key for key, grant in self.grants.items() if grant.users > 1}
        assert scattered_to == {part.key for part in self.scatters}, "scatters hold the pages that they write"
        held = {
            (part.destination, unit): part
            for part, holder in self.receiver._parts.items()
            if holder.region is not None
            for unit in units(holder.region.offset, holder.region.size_bytes)
        }
        for write in filter(self.is_current, self.writes):
            for unit in write.units:
                assert held.get((write.part.destination, unit)) == write.part, "a region was freed under its writer"

    def teardown(self) -> None:
        """Without further faults every transfer ends, and nothing is left of it."""
        if not hasattr(self, "receiver"):
            return
        for _ in range(400):
            while self.packets:
                self.receive(self.packets.pop(0))
                self.act()
            for transfer in list(self.transfers.values()):
                while transfer.unrequested:
                    self.request_next(transfer)
                while transfer.uncomputed:
                    self.compute_next(transfer)
            while self.direct_writes:
                self.finish_direct_write(0, ok=True)
            for write in [write for write in self.writes if write.ends_at is None]:
                self.finish_write(write, "written")
            for part in list(self.scatters):
                self.finish_scatter(part)
            self.wait(0.5)
            self.act()
            busy = self.receiver._parts or self.receiver._transfers or self.packets
            if not busy and not any(sender.parts for sender in self.senders.values()):
                break
        self.receiver.check_integrity(idle=True)
        assert all((one.ring.waiting, one.ring.granted_bytes) == (0, 0) for one in self.receiver._rings)
        assert not any(sender._chunks for sender in self.senders.values()), "a chunk is left"
        for transfer in self.transfers.values():
            assert not transfer.open
            assert transfer.landed or transfer.broken


StagingLives.TestCase.settings = settings(max_examples=examples(80, 25), stateful_step_count=80, deadline=None)
TestStagingLives = StagingLives.TestCase
