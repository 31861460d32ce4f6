"""Staged chunks on prefill: asks decode for room ahead of the step, has each part written when there is room and KV.

Pure, and part of the scheduler's world: events in, effects out. `transfer/staging/sender.py` knows the parts that are
under way to one decode server; this knows which chunks they make up. A chunk has ended when its direct writes and all
of its parts have, and then it is one ChunkWritten, as if nothing of it had been staged.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from ...transfer.data.chunks import ChunkWrite, ChunkWritten, PartWrite, PartWritten
from ...transfer.plan.staged_regions import StagedRegion, pages_holding
from ...transfer.protocol.messages import (
    InstanceId,
    StageArrived,
    StageFree,
    StageGrant,
    StagePart,
    StageRequest,
    StageStopped,
)
from ...transfer.staging.sender import (
    PartFailed,
    PeerRing,
    SenderEffect,
    StageSender,
    WritePart,
    WriterStopped,
    split_tokens,
)
from ..messages.effects import Effect, SendToPeer
from .request import TransferRef


@dataclasses.dataclass(slots=True)
class _Peer:
    links: Sequence[StagedRegion]
    sender: StageSender
    up: bool = True


@dataclasses.dataclass(slots=True)
class _Chunk:
    """Tokens of a transfer that were asked room for. `waiting` parts have no PartWrite yet, `writing` ones have."""

    ref: TransferRef
    token_start: int
    peer: _Peer
    """The connection that its parts belong to: the same server may come back on another, and knows nothing of them."""
    waiting: dict[StagePart, None] = dataclasses.field(default_factory=dict)
    """In the order in which room was asked for."""
    writing: set[StagePart] = dataclasses.field(default_factory=set)
    write: ChunkWrite | None = None
    """Once it is computed."""
    direct: ChunkWritten | None = None
    """How the writes beside the staged parts have ended, on all ranks."""
    parts: list[PartWritten] = dataclasses.field(default_factory=list)
    problem: str | None = None

    @property
    def ended(self) -> bool:
        return self.direct is not None and not self.waiting and not self.writing

    def joined(self) -> ChunkWritten:
        direct = self.direct
        assert direct is not None, "only a chunk that has ended can be joined"
        reason = self.problem if direct.ok else direct.reason
        return ChunkWritten(
            instance=direct.instance,
            key=direct.key,
            token_start=direct.token_start,
            token_end=direct.token_end,
            ok=reason is None,
            reason=reason or "",
            late_writes=direct.late_writes or any(part.late_writes for part in self.parts),
            writes=direct.writes + sum(part.writes for part in self.parts),
            bytes_written=direct.bytes_written + sum(part.bytes_written for part in self.parts),
            checksums=direct.checksums if reason is None else (),
        )


class StagedSends:
    """All chunks that go to decode servers through their rings. Others leave no trace here."""

    def __init__(self, page_size: int, counters: "collections.Counter[str]", effects: list[Effect]) -> None:
        """Appends to `effects`."""
        self._page_size = page_size
        self._counters = counters
        self._effects = effects
        self._peers: dict[InstanceId, _Peer] = {}
        self._chunks: dict[tuple[TransferRef, int], _Chunk] = {}
        """By transfer and first token."""
        self._chunk_of: dict[tuple[InstanceId, StagePart], _Chunk] = {}
        """Of every part that waits or is being written."""
        self._ended: list[ChunkWritten] = []

    @property
    def parts(self) -> int:
        """Parts that have no room yet, are waiting for their KV, or are being written."""
        return len(self._chunk_of)

    @property
    def idle(self) -> bool:
        """No part of any transfer is under way, and decode is done with all that were."""
        return not self._chunk_of and all(peer.sender.idle for peer in self._peers.values())

    def peer_up(self, instance: InstanceId, links: Iterable[StagedRegion]) -> None:
        """A decode server paired, to which these links are staged. One that was only silent goes on where it was."""
        staged = list(links)
        if instance in self._peers:
            self._peers[instance].up = True
        elif staged:
            rings = {one.link.destination: PeerRing(one.ring.epoch, one.ring.size_bytes) for one in staged}
            self._peers[instance] = _Peer(staged, StageSender(rings))

    def peer_lost(self, instance: InstanceId) -> None:
        """Nothing is said to it again until it is back."""
        if instance in self._peers:
            self._peers[instance].up = False

    def peer_closed(self, instance: InstanceId) -> None:
        """It is not coming back. Parts that are being written still report their end."""
        self._peers.pop(instance, None)

    def request(self, ref: TransferRef, start: int, end: int, now: float) -> None:
        """Ask for room for tokens [start, end), before they are computed."""
        instance, key = ref
        peer = self._peers.get(instance)
        if peer is None or start >= end:
            return
        chunk = self._chunks[ref, start] = _Chunk(ref, start, peer)
        parts = [
            (StagePart(link.ring.epoch, key, link.link.source, link.link.destination, link.block, *tokens), link)
            for link in peer.links
            for tokens in split_tokens(start, end, token_bytes=link.token_bytes, limit_bytes=link.part_bytes)
        ]
        for part, link in sorted(parts, key=lambda entry: entry[0].token_start):  # every writer gets its turn
            chunk.waiting[part] = None
            self._chunk_of[instance, part] = chunk
            self._act(instance, peer.sender.request(part, part.tokens * link.token_bytes, now), now)

    def send(self, write: ChunkWrite, now: float) -> None:
        """The KV of a chunk is there: write its parts, as soon as there is room."""
        ref = (write.instance, write.key)
        peer = self._peers.get(write.instance)
        if peer is None:
            return
        if (ref, write.token_start) not in self._chunks:
            self.request(ref, write.token_start, write.token_end, now)
        chunk = self._chunks[ref, write.token_start]
        chunk.write = write
        for part in list(chunk.waiting):
            effects = peer.sender.computed(part)
            self._counters["staged_grants_waited"] += not effects
            self._act(write.instance, effects, now)

    def abort(self, ref: TransferRef, reason: str, now: float) -> None:
        """Write nothing more of a transfer. Chunks that were handed over still end, when what is being written has."""
        self._stop(ref, reason, now)
        for chunk in self._of(ref):
            if chunk.write is None:
                del self._chunks[ref, chunk.token_start]

    def receive(self, instance: InstanceId, message: StageGrant | StageFree, now: float) -> None:
        """Decode grants room for a part, or is done with it."""
        peer = self._peers.get(instance)
        if peer is None:
            return
        match message:
            case StageGrant():
                self._act(instance, peer.sender.granted(message, now), now)
            case StageFree():
                self._act(instance, peer.sender.freed(message), now)

    def part_written(self, written: PartWritten, now: float) -> None:
        """A part has ended on its rank, one way or the other."""
        instance, part = written.instance, written.part
        chunk = self._chunk_of.pop((instance, part))
        chunk.writing.remove(part)
        chunk.parts.append(written)
        peer = self._peer_of(chunk)
        if written.ok:
            self._counters["staged_parts"] += 1
            self._counters["staged_bytes"] += written.bytes_written
            if peer is not None:
                self._act(instance, peer.sender.written(part, now), now)
        else:
            if peer is not None:
                effects = peer.sender.failed(part, written.reason, now, late_writes=written.late_writes)
                self._act(instance, effects, now)
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
        """Say again what has not been answered for long."""
        for instance, peer in self._peers.items():
            if peer.up:
                self._act(instance, peer.sender.due(now), now)

    def take_ended(self) -> list[ChunkWritten]:
        """Chunks that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _act(self, instance: InstanceId, effects: list[SenderEffect], now: float) -> None:
        for effect in effects:
            match effect:
                case StageRequest() | StageArrived() | StageStopped():
                    self._effects.append(SendToPeer(instance, effect))
                case WritePart(part=part, offset=offset, size_bytes=size_bytes):
                    self._write(self._chunk_of[instance, part], part, offset, size_bytes)
                case PartFailed(part=part, reason=reason):
                    chunk = self._chunk_of.get((instance, part))
                    if chunk is not None:  # not one whose write has failed: part_written() sees to that
                        self._stop(chunk.ref, reason, now)
                case WriterStopped():
                    pass  # the chunks that were handed over say so

    def _write(self, chunk: _Chunk, part: StagePart, offset: int, size_bytes: int) -> None:
        write = chunk.write
        assert write is not None, f"{part} is written before it is computed"
        del chunk.waiting[part]
        chunk.writing.add(part)
        first = write.token_start - write.token_start % self._page_size  # token, of the chunk's first page
        pages, start = pages_holding(
            write.source_pages, self._page_size, part.token_start - first, part.token_end - first
        )
        self._effects.append(PartWrite(write.instance, part, offset, size_bytes, pages, start))

    def _stop(self, ref: TransferRef, reason: str, now: float) -> None:
        """Start no more writes for a transfer; its chunks end without what they lack."""
        instance, key = ref
        chunks = self._of(ref)
        for chunk in chunks:
            chunk.problem = chunk.problem or reason
            for part in chunk.waiting:
                del self._chunk_of[instance, part]
            chunk.waiting.clear()
        if chunks and (peer := self._peer_of(chunks[0])) is not None:
            self._act(instance, peer.sender.abort(key, now), now)
        for chunk in chunks:
            self._check_end(chunk)

    def _check_end(self, chunk: _Chunk) -> None:
        place = chunk.ref, chunk.token_start
        if chunk.ended and place in self._chunks:
            del self._chunks[place]
            self._ended.append(chunk.joined())

    def _peer_of(self, chunk: _Chunk) -> _Peer | None:
        """None when its connection is closed."""
        peer = self._peers.get(chunk.ref[0])
        return peer if peer is chunk.peer else None

    def _of(self, ref: TransferRef) -> list[_Chunk]:
        return [chunk for chunk in self._chunks.values() if chunk.ref == ref]
