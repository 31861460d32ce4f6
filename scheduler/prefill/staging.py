"""The staged path on prefill: requests regions of decode's staging rings and issues each write when it is allowed.

Pure: events in, effects out. A chunk is divided into parts; each part is written once, when decode has granted its
region and its KV is computed. A chunk ends when its direct writes and all its parts have ended. It is then reported as
one ChunkWritten, like a chunk without staging.

    REQUESTED -> GRANTED -> WRITING -> StageArrived
        '-----------'----------'-----> StageStopped

Decode frees no region without the final message about its part, StageArrived or StageStopped, so it is sent only when
no write of the part is running and none will follow. A grant that crosses it is ignored.
"""

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ...memory.pages import pages_holding
from ...transfer.data.chunks import ChunkWrite, ChunkWritten, PartWrite, PartWritten, joined_bytes
from ...transfer.plan.staged_regions import StagedRegion
from ...transfer.protocol.messages import (
    InstanceId,
    StageArrived,
    StageGrant,
    StagePart,
    StageRequest,
    StageStopped,
)
from ..messages.effects import Effect, SendToPeer
from .request import TransferRef


@dataclass(slots=True)
class _Part:
    """A part that has not ended."""

    size_bytes: int
    ring_bytes: int
    grant: StageGrant | None = None
    writing: bool = False


@dataclass(slots=True, eq=False)
class _Chunk:
    """Tokens of a transfer for which regions were requested."""

    parts: dict[StagePart, _Part] = field(default_factory=dict)
    """Those that have not ended, in the order of the requests."""
    stopped: bool = False
    write: ChunkWrite | None = None
    """Set when the chunk is computed."""
    direct: ChunkWritten | None = None
    """Set when the direct writes have ended on all ranks."""
    written: list[PartWritten] = field(default_factory=list)

    def result(self) -> ChunkWritten | None:
        """How the chunk has ended; None while any of its writes is still running or waiting."""
        if self.direct is None or self.parts:
            return None
        ended: list[ChunkWritten | PartWritten] = [self.direct, *self.written]
        return msgspec.structs.replace(
            self.direct,
            late_writes=any(one.late_writes for one in ended),
            writes=sum(one.writes for one in ended),
            bytes_written=sum(one.bytes_written for one in ended),
            transport_bytes=joined_bytes(one.transport_bytes for one in ended),
        )


class StagedSends:
    """The staged chunks of a prefill server."""

    def __init__(self, page_size: int, counters: "collections.Counter[str]", effects: list[Effect]) -> None:
        """Appends to `effects`."""
        self.regions: dict[InstanceId, Sequence[StagedRegion]] = {}
        """What is staged to each paired decode server, if anything is."""
        self._page_size = page_size
        self._counters = counters
        self._effects = effects
        self._chunks: dict[TransferRef, dict[int, _Chunk]] = {}
        """Those that have not ended, by transfer and first token."""

    @property
    def parts(self) -> int:
        """Parts that wait for their region or their KV, or are being written."""
        return sum(len(chunk.parts) for chunks in self._chunks.values() for chunk in chunks.values())

    def request(self, ref: TransferRef, start: int, end: int) -> None:
        """Request regions for tokens [start, end) before they are computed."""
        if start >= end:
            return
        instance, key = ref
        parts = [(part, region) for region in self.regions[instance] for part in region.parts(key, start, end)]
        parts.sort(key=lambda entry: entry[0].token_start)  # so that writing ranks take turns
        chunk = self._chunks.setdefault(ref, {})[start] = _Chunk()
        for part, region in parts:
            size_bytes = part.tokens * region.token_bytes
            chunk.parts[part] = _Part(size_bytes, region.ring.size_bytes)
            self._effects.append(SendToPeer(instance, StageRequest(part, size_bytes)))

    def send(self, write: ChunkWrite) -> None:
        """The KV of a chunk is computed: write the parts that have a region now, the others when they get one."""
        ref = write.instance, write.key
        if write.token_start not in self._chunks.get(ref, {}):
            self.request(ref, write.token_start, write.token_end)
        chunk = self._chunks[ref][write.token_start]
        chunk.write = write
        for part, state in chunk.parts.items():
            self._counters["staged_grants_waited"] += state.grant is None
            self._write_if_ready(chunk, part)

    def granted(self, instance: InstanceId, grant: StageGrant) -> str | None:
        """Decode grants the region of a part. Returns the reason if the transfer has to fail."""
        part = grant.part
        chunks = self._chunks.get((instance, part.key), {})
        chunk = next((chunk for chunk in chunks.values() if part in chunk.parts), None)
        if chunk is None or chunk.parts[part].grant is not None:
            return None
        state = chunk.parts[part]
        if not 0 <= grant.offset <= state.ring_bytes - state.size_bytes:
            return f"decode granted offset {grant.offset} of a ring of {state.ring_bytes} bytes"
        state.grant = grant
        self._write_if_ready(chunk, part)
        return None

    def part_written(self, written: PartWritten) -> ChunkWritten | None:
        """The write of a part has ended on its rank. Returns how its chunk has ended, if it was the last."""
        chunks = self._chunks[written.instance, written.part.key]
        start, chunk = next((start, chunk) for start, chunk in chunks.items() if written.part in chunk.parts)
        state = chunk.parts.pop(written.part)
        assert state.writing, f"{written.part} was not being written"
        assert state.grant is not None, "a part is written into its grant"
        chunk.written.append(written)
        if written.ok:
            self._counters["staged_parts"] += 1
            self._counters["staged_bytes"] += written.bytes_written
        final: StageArrived | StageStopped = StageStopped(written.part, written.late_writes)
        if written.ok and not chunk.stopped:
            final = StageArrived(written.part, state.grant.region)
        self._effects.append(SendToPeer(written.instance, final))
        return self._take_ended((written.instance, written.part.key), start)

    def chunk_written(self, written: ChunkWritten) -> ChunkWritten | None:
        """The direct writes of a chunk have ended on all ranks. Returns how the chunk has ended, if it has."""
        ref = written.instance, written.key
        self._chunks[ref][written.token_start].direct = written
        return self._take_ended(ref, written.token_start)

    def stop(self, ref: TransferRef) -> list[ChunkWritten]:
        """Start no more writes of a transfer. Returns the chunks that have ended; others end with their running writes.
        Chunks that were not passed to send() are dropped.
        """
        ended = []
        for start, chunk in self._chunks.pop(ref, {}).items():
            chunk.stopped = True
            for part in [part for part, state in chunk.parts.items() if not state.writing]:
                del chunk.parts[part]
                self._effects.append(SendToPeer(ref[0], StageStopped(part)))
            if (result := chunk.result()) is not None:
                ended.append(result)
            elif chunk.write is not None:
                self._chunks.setdefault(ref, {})[start] = chunk
        return ended

    def _take_ended(self, ref: TransferRef, start: int) -> ChunkWritten | None:
        """Remove a chunk, and return how it has ended, if it has."""
        chunks = self._chunks[ref]
        result = chunks[start].result()
        if result is not None:
            del chunks[start]
            if not chunks:
                del self._chunks[ref]
        return result

    def _write_if_ready(self, chunk: _Chunk, part: StagePart) -> None:
        state, write = chunk.parts[part], chunk.write
        if state.grant is None or write is None:
            return
        state.writing = True
        first = write.token_start - write.token_start % self._page_size  # the first token of the chunk's first page
        start, end = part.token_start - first, part.token_end - first
        pages, start = pages_holding(write.source_pages, self._page_size, start, end)
        self._effects.append(PartWrite(write.instance, part, state.grant.offset, state.size_bytes, pages, start))
