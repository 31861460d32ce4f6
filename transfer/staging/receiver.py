"""The staged path on decode, without sockets, memory or clock: grants regions, says when to scatter, frees.

Each method takes an event and returns what to do about it, in order. The caller sends the messages, scatters, and tells
when a scatter has ended. Messages may be lost, repeated and reordered: every repetition is answered, none does more.

Two rules keep memory safe. A region that may still be written has an owner: it is freed after its writer's last word
(StageArrived, StageStopped, or the end of the transfer's writer), plus a quarantine where bytes may be under way. A
closed connection is a last word with late writes; silence is none. And destination pages are touched by our own
scatters alone, each issued once: when those of a transfer have ended its pages are safe, whatever its writers do.
"""

import enum
import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ..plan.ring import Region, StagingRing
from ..protocol.messages import (
    HeadSlice,
    InstanceId,
    StageArrived,
    StageFree,
    StageGrant,
    StagePart,
    StageRequest,
    StageStopped,
    TransferKey,
)


@dataclass(frozen=True, slots=True)
class Post:
    """Send this message to the peer."""

    instance: InstanceId
    message: StageGrant | StageFree


@dataclass(frozen=True, slots=True)
class ScatterPart:
    """Scatter the region into the transfer's pages, once; then scattered(), when the GPU has done it."""

    part: StagePart
    region: Region


@dataclass(frozen=True, slots=True)
class TransferLanded:
    """Every token of every block of this transfer is in its pages."""

    key: TransferKey


@dataclass(frozen=True, slots=True)
class PagesQuiet:
    """No scatter of this closed transfer is running any more; its pages may have a new owner."""

    key: TransferKey


@dataclass(frozen=True, slots=True)
class BadRequest:
    """The peer asked for what does not belong to this transfer; it should be aborted with this reason."""

    key: TransferKey
    reason: str


ReceiverEffect = Post | ScatterPart | TransferLanded | PagesQuiet | BadRequest


class _Holding(enum.Enum):
    QUEUED = enum.auto()
    GRANTED = enum.auto()
    """The writer may write. Nobody waits for the region any more if the transfer is closed."""
    SCATTERING = enum.auto()
    RESTING = enum.auto()
    """The writer has stopped; bytes under way may land until `release_at`."""


@dataclass(slots=True)
class _Incoming:
    """A part that has a place in the ring or waits for one."""

    part: StagePart
    instance: InstanceId
    state: _Holding = _Holding.QUEUED
    region: Region | None = None
    release_at: float = math.inf


@dataclass(slots=True)
class _Transfer:
    """An open transfer. `parts` holds all that were ever named, so that none is granted twice."""

    instance: InstanceId
    token_start: int
    token_end: int
    spans: dict[tuple[int, HeadSlice], list[tuple[int, int]]]
    """For each writer and block, the tokens that its parts were named for: ascending, and apart."""
    missing: int
    """Tokens that are not in their pages yet, summed over the blocks."""
    parts: set[StagePart] = field(default_factory=set)

    def name(self, part: StagePart) -> None:
        """Remember a part that has no problem."""
        if part not in self.parts:
            self.parts.add(part)
            insort(self.spans[part.writer, part.block], (part.token_start, part.token_end))


class StageReceiver:
    """The ring of one decode rank and every part in it, from any number of prefill servers of any sharding."""

    def __init__(self, rank: int, ring: StagingRing[StagePart], *, cell_bytes: int, quarantine_s: float) -> None:
        """`cell_bytes` is what one token takes in one head of one layer, all planes together."""
        self.rank = rank
        self.ring = ring
        self._cell_bytes = cell_bytes
        self._quarantine_s = quarantine_s
        self._transfers: dict[TransferKey, _Transfer] = {}
        self._parts: dict[StagePart, _Incoming] = {}

    @property
    def idle(self) -> bool:
        return not self._transfers and not self._parts

    def part_bytes(self, part: StagePart) -> int:
        """What a part takes in the ring."""
        return part.tokens * part.block.cells * self._cell_bytes

    def open(
        self,
        key: TransferKey,
        instance: InstanceId,
        token_start: int,
        token_end: int,
        blocks: Collection[tuple[int, HeadSlice]],
    ) -> None:
        """Expect these tokens of these (writer, block) pairs. To be called before the peer hears of the transfer."""
        assert key not in self._transfers, f"transfer {key} is already open"
        missing = (token_end - token_start) * len(blocks)
        assert missing > 0, f"transfer {key} has nothing to stage"
        self._transfers[key] = _Transfer(instance, token_start, token_end, {block: [] for block in blocks}, missing)

    def requested(self, instance: InstanceId, message: StageRequest) -> list[ReceiverEffect]:
        part = message.part
        incoming = self._parts.get(part)
        if incoming is not None:
            return self._post_grant(incoming) if incoming.instance == instance else []
        transfer = self._transfer_of(part, instance)
        if transfer is None or part in transfer.parts:
            return [Post(instance, StageFree(part))]
        problem = self._problem(transfer, part)
        size_bytes = self.part_bytes(part)
        if problem is None and message.size_bytes != size_bytes:
            problem = f"it asks for {message.size_bytes} bytes, these tokens have {size_bytes}"
        if problem is None and size_bytes > self.ring.capacity_bytes:
            problem = f"it has {size_bytes} bytes, the ring {self.ring.capacity_bytes}"
        if problem is not None:
            return [BadRequest(part.key, f"staging of {part}: {problem}"), Post(instance, StageFree(part))]
        transfer.name(part)
        self._parts[part] = _Incoming(part, instance)
        self.ring.request(part, size_bytes)
        return self._grant()

    def arrived(self, instance: InstanceId, message: StageArrived) -> list[ReceiverEffect]:
        incoming = self._parts.get(message.part)
        if incoming is None:
            return [Post(instance, StageFree(message.part))]
        if incoming.instance != instance or incoming.state is not _Holding.GRANTED:
            return []
        region = incoming.region
        assert region is not None, "a granted part has a region"
        if message.region != region.position:
            return []
        if message.part.key not in self._transfers:
            return [self._end(incoming), *self._grant()]
        incoming.state = _Holding.SCATTERING
        return [ScatterPart(message.part, region)]

    def stopped(self, instance: InstanceId, message: StageStopped, now: float) -> list[ReceiverEffect]:
        part = message.part
        incoming = self._parts.get(part)
        if incoming is not None:
            named = [incoming] if incoming.instance == instance else []
            return self._writer_done(named, message.late_writes, now)
        transfer = self._transfer_of(part, instance)
        if transfer is not None and self._problem(transfer, part) is None:
            transfer.name(part)  # its request may still be on its way: it must find the part over
        return [Post(instance, StageFree(part))]

    def scattered(self, part: StagePart) -> list[ReceiverEffect]:
        """The part is in its pages and its region has been read: the GPU event has fired."""
        incoming = self._parts[part]
        assert incoming.state is _Holding.SCATTERING, f"{part} was not being scattered"
        effects = [self._end(incoming), *self._grant()]
        transfer = self._transfers.get(part.key)
        if transfer is None:
            return effects if self._scattering(part.key) else [*effects, PagesQuiet(part.key)]
        transfer.missing -= part.tokens
        return effects if transfer.missing else [*effects, TransferLanded(part.key)]

    def close(self, key: TransferKey) -> list[ReceiverEffect]:
        """The transfer is over: landed, or given up. Answers PagesQuiet once, when no scatter of it is running.

        Regions that its writer may still write stay out of use until it has stopped. Unknown keys are fine.
        """
        if self._transfers.pop(key, None) is None:
            return []
        for incoming in self._of(key):
            if incoming.state is _Holding.QUEUED:
                self._forget(incoming)
        return self._grant() if self._scattering(key) else [*self._grant(), PagesQuiet(key)]

    def writer_stopped(self, key: TransferKey, now: float, *, late_writes: bool) -> list[ReceiverEffect]:
        """Prefill says so of the whole transfer (AbortAck, TransferFailed): no rank of it writes any more."""
        return self._writer_done(self._of(key), late_writes, now)

    def peer_closed(self, instance: InstanceId, now: float) -> list[ReceiverEffect]:
        """The connection of this peer is closed: it writes nothing more once the kernel's buffers have been read."""
        theirs = [incoming for incoming in self._parts.values() if incoming.instance == instance]
        return self._writer_done(theirs, True, now)

    def due(self, now: float) -> list[ReceiverEffect]:
        """Free the regions whose quarantine has passed."""
        rested = [incoming for incoming in self._parts.values() if incoming.release_at <= now]
        return [*(self._end(incoming) for incoming in rested), *self._grant()]

    def check_integrity(self) -> None:
        """Every region and every place in the queue belongs to one part, in the right state."""
        self.ring.check_integrity()
        regions = [incoming.region for incoming in self._parts.values() if incoming.region is not None]
        assert len(self._parts) - len(regions) == self.ring.waiting
        assert sum(region.size_bytes for region in regions) == self.ring.granted_bytes
        for incoming in self._parts.values():
            assert (incoming.region is None) == (incoming.state is _Holding.QUEUED), incoming
            assert (incoming.release_at < math.inf) == (incoming.state is _Holding.RESTING), incoming

    def _transfer_of(self, part: StagePart, instance: InstanceId) -> _Transfer | None:
        """The open transfer that this peer means; None when it is over, another peer's, or of an earlier ring."""
        transfer = self._transfers.get(part.key)
        ours = transfer is not None and transfer.instance == instance and part.epoch == self.ring.epoch
        return transfer if ours else None

    def _problem(self, transfer: _Transfer, part: StagePart) -> str | None:
        """Why a part is none of this transfer's, or None. Bounds what a peer can make us remember."""
        spans = transfer.spans.get((part.writer, part.block))
        if part.destination != self.rank or spans is None:
            return f"rank {part.writer} does not write {part.block} to rank {part.destination}"
        if not transfer.token_start <= part.token_start < part.token_end <= transfer.token_end:
            return f"the transfer has tokens [{transfer.token_start}, {transfer.token_end})"
        after = bisect_left(spans, (part.token_start, part.token_end))
        for start, end in () if part in transfer.parts else spans[max(0, after - 1) : after + 1]:
            if start < part.token_end and part.token_start < end:
                return f"it overlaps tokens [{start}, {end}), which it has named before"
        return None

    def _writer_done(self, parts: Iterable[_Incoming], late_writes: bool, now: float) -> list[ReceiverEffect]:
        """The writers of these have stopped. Their first word counts: a later one knows nothing of late writes."""
        effects: list[ReceiverEffect] = []
        for incoming in parts:
            if incoming.state is _Holding.QUEUED or (incoming.state is _Holding.GRANTED and not late_writes):
                effects.append(self._end(incoming))
            elif incoming.state is _Holding.GRANTED:
                incoming.state, incoming.release_at = _Holding.RESTING, now + self._quarantine_s
        return [*effects, *self._grant()]

    def _end(self, incoming: _Incoming) -> Post:
        """Take the part out and tell its writer. The caller grants what has become free, once, when it is through."""
        self._forget(incoming)
        return Post(incoming.instance, StageFree(incoming.part))

    def _forget(self, incoming: _Incoming) -> None:
        del self._parts[incoming.part]
        if incoming.region is None:
            self.ring.withdraw(incoming.part)
        else:
            self.ring.free(incoming.region.position)

    def _grant(self) -> list[ReceiverEffect]:
        effects: list[ReceiverEffect] = []
        for part, region in self.ring.grant():
            incoming = self._parts[part]
            incoming.state, incoming.region = _Holding.GRANTED, region
            effects += self._post_grant(incoming)
        return effects

    def _post_grant(self, incoming: _Incoming) -> list[ReceiverEffect]:
        """Say, or repeat, where the part goes. A closed transfer's part is not invited any more."""
        if incoming.state is not _Holding.GRANTED or incoming.part.key not in self._transfers:
            return []
        assert incoming.region is not None, "a granted part has a region"
        grant = StageGrant(incoming.part, incoming.region.position, incoming.region.offset)
        return [Post(incoming.instance, grant)]

    def _of(self, key: TransferKey) -> list[_Incoming]:
        return [incoming for part, incoming in self._parts.items() if part.key == key]

    def _scattering(self, key: TransferKey) -> bool:
        return any(incoming.state is _Holding.SCATTERING for incoming in self._of(key))
