"""The staged path on prefill: requests regions of decode's staging rings and issues each write when it is allowed.

Pure: events in, effects out. A chunk is divided into parts; each part is written once, when decode has granted its
region and its KV is computed. A chunk ends when its direct writes and all its parts have ended. It is then reported as
one ChunkWritten, like a chunk without staging.

    REQUESTED -> GRANTED -> WRITING -> WRITTEN     (StageArrived)
        '-----------'----------'-----> STOPPED     (StageStopped)      then StageFree from decode removes the part

Messages may be lost, repeated or reordered: a message without an answer is sent again, and a repeated answer changes
nothing. The final message about a part is StageArrived or StageStopped. Decode frees no region without it, so it is
sent only when no write of the part is running and none will follow.
"""

import collections
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...memory.pages import pages_holding
from ...transfer.data.chunks import ChunkWrite, ChunkWritten, PartWrite, PartWritten, joined_bytes
from ...transfer.plan.staged_regions import StagedRegion
from ...transfer.protocol.messages import (
    InstanceId,
    StageArrived,
    StageFree,
    StageGrant,
    StagePart,
    StageRequest,
    StageStopped,
)
from ..messages.effects import Effect, SendToPeer
from .request import TransferRef

RESEND_AFTER_S = 1.0


@dataclass(slots=True)
class _Peer:
    """One connection of a decode server. After a reconnect, the server has no record of parts from before."""

    regions: Sequence[StagedRegion]
    up: bool = True
    closed: bool = False


class _State(enum.Enum):
    REQUESTED = enum.auto()
    GRANTED = enum.auto()
    WRITING = enum.auto()
    WRITTEN = enum.auto()
    STOPPED = enum.auto()


@dataclass(slots=True, eq=False)
class _Part:
    """A part for which decode has not sent StageFree. `message` is sent again until decode answers it."""

    part: StagePart
    size_bytes: int
    ring_bytes: int
    chunk: "_Chunk"
    message: StageRequest | StageArrived | StageStopped
    sent_at: float
    state: _State = _State.REQUESTED
    grant: StageGrant | None = None


@dataclass(slots=True, eq=False)
class _Chunk:
    """Tokens of a transfer for which regions were requested."""

    ref: TransferRef
    token_start: int
    peer: _Peer
    unfinished: dict[StagePart, _Part] = field(default_factory=dict)
    """Parts that are REQUESTED, GRANTED or WRITING, in the order of the requests."""
    write: ChunkWrite | None = None
    """Set when the chunk is computed."""
    direct: ChunkWritten | None = None
    """Set when the direct writes have ended on all ranks."""
    written: list[PartWritten] = field(default_factory=list)
    problem: str | None = None

    def result(self) -> ChunkWritten | None:
        """How the chunk has ended; None while any of its writes is still running or waiting."""
        direct = self.direct
        if direct is None or self.unfinished:
            return None
        reason = self.problem if direct.ok else direct.reason
        return ChunkWritten(
            instance=direct.instance,
            key=direct.key,
            token_start=direct.token_start,
            token_end=direct.token_end,
            ok=reason is None,
            reason=reason or "",
            late_writes=direct.late_writes or any(part.late_writes for part in self.written),
            writes=direct.writes + sum(part.writes for part in self.written),
            bytes_written=direct.bytes_written + sum(part.bytes_written for part in self.written),
            checksums=direct.checksums if reason is None else (),
            transport_bytes=joined_bytes([direct.transport_bytes, *(part.transport_bytes for part in self.written)]),
        )


class StagedSends:
    """All staged chunks of a prefill server. A ChunkWritten of a chunk without staged parts is passed on unchanged."""

    def __init__(self, page_size: int, counters: "collections.Counter[str]", effects: list[Effect]) -> None:
        """Appends to `effects`."""
        self._page_size = page_size
        self._counters = counters
        self._effects = effects
        self._peers: dict[InstanceId, _Peer] = {}
        self._chunks: dict[tuple[TransferRef, int], _Chunk] = {}
        """By transfer and first token."""
        self._parts: dict[tuple[InstanceId, StagePart], _Part] = {}
        self._ended: list[ChunkWritten] = []

    @property
    def parts(self) -> int:
        """Parts that wait for their region or their KV, or are being written."""
        return sum(len(chunk.unfinished) for chunk in self._chunks.values())

    def holds(self, instance: InstanceId, part: StagePart) -> bool:
        """Whether a part for this decode server is ours, and decode is not done with it."""
        return (instance, part) in self._parts

    def stages(self, instance: InstanceId) -> bool:
        """Whether some regions for this decode server are staged."""
        return instance in self._peers

    def peer_up(self, instance: InstanceId, regions: Iterable[StagedRegion]) -> None:
        """A decode server paired; these regions are staged. If it was only silent, its connection and parts go on."""
        staged = list(regions)
        if instance in self._peers:
            self._peers[instance].up = True
        elif staged:
            self._peers[instance] = _Peer(staged)

    def peer_lost(self, instance: InstanceId) -> None:
        """Send nothing again until the server is back."""
        if instance in self._peers:
            self._peers[instance].up = False

    def peer_closed(self, instance: InstanceId) -> None:
        """The connection does not come back. Parts that are being written still report their end."""
        peer = self._peers.pop(instance, None)
        if peer is not None:
            peer.up, peer.closed = False, True
            for ref, part in list(self._parts.items()):
                if part.chunk.peer is peer and part.part not in part.chunk.unfinished:
                    del self._parts[ref]

    def request(self, ref: TransferRef, start: int, end: int, now: float) -> None:
        """Request regions for tokens [start, end) before they are computed."""
        instance, key = ref
        peer = self._peers.get(instance)
        if peer is None or start >= end:
            return
        chunk = self._chunks[ref, start] = _Chunk(ref, start, peer)
        parts = [(part, region) for region in peer.regions for part in region.parts(key, start, end)]
        for part, region in sorted(parts, key=lambda entry: entry[0].token_start):  # so that writing ranks take turns
            size_bytes = part.tokens * region.token_bytes
            message = StageRequest(part, size_bytes)
            outgoing = _Part(part, size_bytes, region.ring.size_bytes, chunk, message, now)
            chunk.unfinished[part] = self._parts[instance, part] = outgoing
            self._send(outgoing, message, now)

    def send(self, write: ChunkWrite, now: float) -> None:
        """The KV of a chunk is computed: write the parts that have a region now, the others when they get one."""
        ref = (write.instance, write.key)
        if write.instance not in self._peers:
            return
        if (ref, write.token_start) not in self._chunks:
            self.request(ref, write.token_start, write.token_end, now)
        chunk = self._chunks[ref, write.token_start]
        chunk.write = write
        for part in chunk.unfinished.values():
            self._counters["staged_grants_waited"] += part.state is _State.REQUESTED
            self._write_if_ready(part)

    def abort(self, ref: TransferRef, reason: str, now: float) -> None:
        """Start no more writes of a transfer. Chunks that were passed to send() end when their running writes end."""
        self._stop(ref, reason, now)
        for chunk in self._chunks_of(ref):
            if chunk.write is None:
                del self._chunks[ref, chunk.token_start]

    def receive(self, instance: InstanceId, message: StageGrant | StageFree, now: float) -> None:
        """Decode grants the region of a part, or is done with the part."""
        peer = self._peers.get(instance)
        if peer is None:
            return
        part = self._parts.get((instance, message.part))
        if part is None or part.chunk.peer is not peer:  # unknown, or of an earlier connection
            if isinstance(message, StageGrant):
                self._effects.append(SendToPeer(instance, StageStopped(message.part)))
            return
        match message:
            case StageGrant(offset=offset) if part.state is _State.REQUESTED:
                if 0 <= offset <= part.ring_bytes - part.size_bytes:
                    part.state, part.grant = _State.GRANTED, message
                    self._write_if_ready(part)
                else:
                    reason = f"decode granted offset {offset} of a ring of {part.ring_bytes} bytes"
                    self._stop(part.chunk.ref, reason, now)
            case StageFree() if part.state is not _State.WRITING:
                # While a part is being written, StageFree is ignored: decode repeats it after the final message.
                del self._parts[instance, message.part]
                if part.chunk.unfinished.pop(message.part, None) is not None:
                    self._stop(part.chunk.ref, "decode has abandoned the transfer", now)

    def part_written(self, written: PartWritten, now: float) -> None:
        """The write of a part has ended on its rank, successfully or not."""
        part = self._parts[written.instance, written.part]
        assert part.state is _State.WRITING, f"{written.part} was not being written"
        assert part.grant is not None, "a part is written into its grant"
        chunk = part.chunk
        del chunk.unfinished[written.part]
        chunk.written.append(written)
        if written.ok:
            self._counters["staged_parts"] += 1
            self._counters["staged_bytes"] += written.bytes_written
        if chunk.peer.closed:
            del self._parts[written.instance, written.part]
        elif written.ok and chunk.problem is None:
            part.state = _State.WRITTEN
            self._send(part, StageArrived(written.part, part.grant.region), now)
        else:
            part.state = _State.STOPPED
            self._send(part, StageStopped(written.part, written.late_writes), now)
        if not written.ok:
            self._stop(chunk.ref, written.reason, now)
        self._check_end(chunk)

    def chunk_written(self, written: ChunkWritten, now: float) -> None:
        """The direct writes of a chunk have ended on all ranks."""
        chunk = self._chunks.get(((written.instance, written.key), written.token_start))
        if chunk is None:
            self._ended.append(written)
            return
        chunk.direct = written
        if not written.ok:
            self._stop(chunk.ref, written.reason, now)
        self._check_end(chunk)

    def due(self, now: float) -> None:
        """Send again what decode has not answered in RESEND_AFTER_S."""
        for part in self._parts.values():
            waits_for_answer = part.state in (_State.REQUESTED, _State.WRITTEN, _State.STOPPED)
            if waits_for_answer and part.chunk.peer.up and now - part.sent_at >= RESEND_AFTER_S:
                self._send(part, part.message, now)

    def take_ended(self) -> list[ChunkWritten]:
        """Chunks that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _send(self, part: _Part, message: StageRequest | StageArrived | StageStopped, now: float) -> None:
        part.message, part.sent_at = message, now
        self._effects.append(SendToPeer(part.chunk.ref[0], message))

    def _write_if_ready(self, part: _Part) -> None:
        write = part.chunk.write
        if part.state is not _State.GRANTED or write is None or part.chunk.peer.closed:
            return
        assert part.grant is not None, "a granted part has its grant"
        part.state = _State.WRITING
        first = write.token_start - write.token_start % self._page_size  # the first token of the chunk's first page
        start, end = part.part.token_start - first, part.part.token_end - first
        pages, start = pages_holding(write.source_pages, self._page_size, start, end)
        self._effects.append(PartWrite(write.instance, part.part, part.grant.offset, part.size_bytes, pages, start))

    def _stop(self, ref: TransferRef, reason: str, now: float) -> None:
        """Start no more writes of a transfer. Parts that are not being written are stopped, and chunks end without
        them.
        """
        chunks = self._chunks_of(ref)
        for chunk in chunks:
            chunk.problem = chunk.problem or reason
            for part in [part for part in chunk.unfinished.values() if part.state is not _State.WRITING]:
                del chunk.unfinished[part.part]
                if chunk.peer.closed:
                    del self._parts[ref[0], part.part]
                else:
                    part.state = _State.STOPPED
                    self._send(part, StageStopped(part.part), now)
        for chunk in chunks:
            self._check_end(chunk)

    def _check_end(self, chunk: _Chunk) -> None:
        result = chunk.result()
        if result is not None and self._chunks.pop((chunk.ref, chunk.token_start), None) is not None:
            self._ended.append(result)

    def _chunks_of(self, ref: TransferRef) -> list[_Chunk]:
        return [chunk for chunk in self._chunks.values() if chunk.ref == ref]
