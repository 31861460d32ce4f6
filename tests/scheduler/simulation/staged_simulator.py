"""The simulator with staging: decode needs three pieces of every row, one written directly and two staged.

The ring is smaller than a chunk. It is a list of slots, each with the part that was written there last. A part that is
being written may land at any moment, complete or as garbage. A scatter runs some time after its command; then its slot
must hold its part, and its pages must still be reserved.
"""

import collections
import dataclasses
import math

from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator, PageGrant
from pdserve.scheduler.decode.placement.peers import PrefillPeer
from pdserve.scheduler.decode.rooms.staging import RankRing
from pdserve.scheduler.decode.scheduler import DecodeScheduler
from pdserve.scheduler.messages.effects import Effect
from pdserve.scheduler.messages.ranks import CancelChunks, PartReport, PartScattered
from pdserve.transfer.control.events import MessageReceived, PeerClosed
from pdserve.transfer.data.chunks import PartScatter, PartWrite, PartWritten
from pdserve.transfer.plan.copy_regions import CopyRegion
from pdserve.transfer.plan.ring import ALIGNMENT, StagingRing
from pdserve.transfer.plan.staged_regions import StagedRegion
from pdserve.transfer.protocol.messages import (
    InstanceId,
    StageArrived,
    StageFree,
    StageGrant,
    StagePart,
    StageRequest,
    StageRing,
    StageStopped,
)
from tests.scheduler.simulation.simulator import (
    DECODE,
    EOS,
    PAGE_SIZE,
    PAGES,
    QUARANTINE_S,
    Prefix,
    Row,
    Server,
    Simulator,
    Write,
    row_of,
)

TOKEN_BYTES = ALIGNMENT // 2  # a slot has two tokens of a writer
SLOTS = 3
RING = StageRing(0, SLOTS * ALIGNMENT, epoch=3)
REGIONS = [
    StagedRegion(CopyRegion(writer, 0, range(1), range(writer, writer + 1)), RING, TOKEN_BYTES, ALIGNMENT)
    for writer in range(2)
]
PIECES = (None, 0, 1)
"""The writers of a row; None is the direct write."""


@dataclasses.dataclass
class PartInFlight:
    """A write of a part into the ring. Its bytes may land until it has ended and `lands_until` has passed."""

    command: PartWrite
    prompt: Prefix
    cancelled: bool = False
    lands_until: float = math.inf


@dataclasses.dataclass
class Scatter:
    command: PartScatter
    prompt: Prefix
    grant: PageGrant[KvPage]


class StagedSimulator(Simulator):
    def __init__(self, *, stages: int = 1, overlap: bool = False, verifies: bool = False) -> None:
        self.parts: dict[InstanceId, list[PartInFlight]] = collections.defaultdict(list)
        self.late_parts: list[PartInFlight] = []
        self.scatters: list[Scatter] = []
        self.slots: dict[int, StagePart | None] = {}
        self.pieces: dict[Row, dict[int | None, Prefix]] = collections.defaultdict(dict)
        self.healing = False
        super().__init__(stages=stages, overlap=overlap, verifies=verifies)
        ring: StagingRing[StagePart] = StagingRing(RING.size_bytes)
        rings = [RankRing(ring, cell_bytes=TOKEN_BYTES)]
        self.decode = DecodeScheduler(self.decode.limits, PageAllocator[KvPage](PAGES), [EOS], rings=rings)
        for server in self.servers.values():
            self.decode.peer_up(PrefillPeer(server.instance, {server.endpoint}), REGIONS)

    def start(self, endpoint: str) -> None:
        known = set(self.servers)
        super().start(endpoint)
        for instance in set(self.servers) - known:
            self.servers[instance].scheduler.staging.regions[DECODE] = REGIONS
            staging = self.decode.rooms.prefilling.staging
            if staging is not None:  # the first servers start before the rings
                staging.peer_up(instance, REGIONS)

    def kill(self, which: int) -> None:
        if (server := self._pick(which)) is not None:
            for part in self.parts.pop(server.instance, []):
                part.lands_until = self.now + QUARANTINE_S
                self.late_parts.append(part)
            super().kill(which)
            server.scheduler.handle(PeerClosed(DECODE), self.now)

    # -- parts -------------------------------------------------------------------------------------------------

    def end_part(self, which: int, ok: bool, late: bool) -> None:
        if (server := self._pick(which)) is not None and self.parts[server.instance]:
            self._end_part(server, ok, late)

    def scatter_turn(self, which: int) -> None:
        """A rank runs a scatter, independently of its steps."""
        if not self.scatters:
            return
        scatter = self.scatters.pop(which % len(self.scatters))
        part = scatter.command.part
        assert self.slots[scatter.command.offset // ALIGNMENT] == part, (
            f"{part} was overwritten before it was scattered"
        )
        for position in range(part.token_start, part.token_end):
            index = scatter.command.start + position - part.token_start
            row = scatter.command.pages[index // PAGE_SIZE], position % PAGE_SIZE
            assert row[0] in scatter.grant.pages
            self._put_piece(row, part.writer, scatter.prompt[: position + 1])
        self.decode.handle(PartScattered(0, part), self.now)
        self.act()

    def decode_turn(self) -> None:
        if self.healing:
            self.drain_parts()
        super().decode_turn()

    def check(self) -> None:
        self.late_writes_in_flight = [
            write for write in self.late_writes_in_flight if write.lands_until is None or write.lands_until > self.now
        ]
        self.late_parts = [part for part in self.late_parts if part.lands_until > self.now]
        for part in [*self.late_parts, *(part for parts in self.parts.values() for part in parts)]:
            self.slots[part.command.offset // ALIGNMENT] = None  # garbage, at any moment
        for scatter in self.scatters:
            assert scatter.grant in self.decode.allocator._grants, f"{scatter.command.part} goes to released pages"
        super().check()

    def heal(self) -> None:
        self.healing = True
        super().heal()

    def check_end(self) -> None:
        super().check_end()
        assert self.decode.rooms.prefilling.staging is not None
        self.decode.rooms.prefilling.staging.check_integrity(idle=True)
        for server in self.servers.values():
            assert not server.scheduler.staging._chunks

    # -- inside ------------------------------------------------------------------------------------------------

    def _of_decode(self, effect: Effect) -> None:
        match effect:
            case PartScatter(part=part):
                prompt = self.decode.rooms.prefilling.prompts.get(part.key)
                assert prompt is not None, f"{part} is scattered, but its transfer has ended"
                assert prompt.grant is not None
                self.scatters.append(Scatter(effect, tuple(prompt.token_ids), prompt.grant))
            case other:
                super()._of_decode(other)

    def _of_prefill(self, server: Server, effect: Effect) -> None:
        match effect:
            case PartWrite(instance=instance, part=part):
                prompt = tuple(server.scheduler.requests[instance, part.key].token_ids)
                self.parts[server.instance].append(PartInFlight(effect, prompt))
            case other:
                super()._of_prefill(server, other)
        if isinstance(effect, CancelChunks):
            for in_flight in self.parts[server.instance]:
                in_flight.cancelled |= in_flight.command.part.key == effect.key

    def _deliver_down(self, server: Server) -> None:
        match server.to_prefill[0].message:
            case StageGrant() | StageFree() as message:
                server.to_prefill.popleft()
                server.scheduler.handle(MessageReceived(DECODE, message, ()), self.now)
                self.act()
            case _:
                super()._deliver_down(server)

    def _deliver_up(self, server: Server) -> None:
        match server.to_decode[0]:
            case StageRequest() | StageArrived() | StageStopped() as message:
                server.to_decode.popleft()
                self.decode.handle(MessageReceived(server.instance, message, ()), self.now)
                self.act()
            case _:
                super()._deliver_up(server)

    def _end_part(self, server: Server, ok: bool, late: bool) -> None:
        in_flight = self.parts[server.instance].pop(0)
        ok = ok and not in_flight.cancelled
        part = in_flight.command.part
        self.slots[in_flight.command.offset // ALIGNMENT] = part if ok else None
        if late and not ok:
            in_flight.lands_until = self.now + QUARANTINE_S
            self.late_parts.append(in_flight)
        written = PartWritten(in_flight.command.instance, part, ok, "" if ok else "injected", late and not ok, 1, 8)
        server.scheduler.handle(PartReport(0, written), self.now)
        self.act()

    def drain_parts(self) -> None:
        """Finish all parts, repeatedly: the grant of one may wait for the end of another."""
        for _ in range(20):
            for server in self.servers.values():
                while self.parts[server.instance]:
                    self._end_part(server, ok=True, late=False)
                while server.to_decode:
                    self._deliver_up(server)
            while self.scatters:
                self.scatter_turn(0)
            for server in self.servers.values():
                while server.to_prefill:
                    self._deliver_down(server)

    def _land(self, write: Write, *, intact: bool) -> None:
        chunk = write.chunk
        for position in range(chunk.token_start, chunk.token_end):
            row = row_of(chunk, chunk.indices, position)
            self._put_piece(row, None, write.prompt[: position + 1] if intact else ())

    def _put_piece(self, row: Row, piece: int | None, prefix: Prefix) -> None:
        pieces = self.pieces[row]
        pieces[piece] = prefix
        self.memory[row] = prefix if all(pieces.get(other) == prefix for other in PIECES) else ()
