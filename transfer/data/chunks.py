"""Commands of a leader to its ranks to move KV, and their results. Plain data, used by schedulers and messages."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from ..protocol.checksum import add_sums
from ..protocol.messages import InstanceId, StagePart, TransferKey


class ChunkWrite(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Write KV of tokens [token_start, token_end) into the memory of a decode server.

    `source_pages` and `indices` are for these tokens only, so that every page of a long prompt is sent to the ranks
    once. Both start with the page that holds token `token_start`. `indices` are pages of the decode server or, with
    granularity "token", one row per token. `after` is set if the KV is not computed yet: it is the `command_id` of the
    step that computes it, which the ranks get after this command. With `hot_indices`, latent rows go to these indices
    of the hot pool of a HiSparse server, and not to `indices` of its host memory.
    """

    instance: InstanceId
    key: TransferKey
    token_start: int
    token_end: int
    source_pages: list[int]
    indices: list[int]
    granularity: Literal["page", "token"] = "page"
    verify: bool = False
    after: int | None = None
    hot_indices: list[int] = []


class ChunkWritten(msgspec.Struct, array_like=True, frozen=True):
    """The result of a ChunkWrite on one prefill rank. `ok`: all bytes of this rank are in decode's memory.

    With `late_writes`, bytes in flight may still land for a while. `checksums` is this rank's share of the sum of each
    decode rank; empty if the chunk is not verified or has failed.
    """

    instance: InstanceId
    key: TransferKey
    token_start: int
    token_end: int
    ok: bool
    reason: str = ""
    late_writes: bool = False
    writes: int = 0
    bytes_written: int = 0
    checksums: tuple[int, ...] = ()
    transport_bytes: dict[str, int] = {}
    """`bytes_written` by transport."""


def joined(parts: Sequence[ChunkWritten]) -> ChunkWritten:
    """Join the results of all ranks for one chunk."""
    failed = [part for part in parts if not part.ok]
    return msgspec.structs.replace(
        parts[0],
        ok=not failed,
        reason=failed[0].reason if failed else "",
        late_writes=any(part.late_writes for part in parts),
        writes=sum(part.writes for part in parts),
        bytes_written=sum(part.bytes_written for part in parts),
        checksums=tuple(add_sums(sums) for sums in zip(*(part.checksums for part in parts), strict=False)),
        transport_bytes=joined_bytes(part.transport_bytes for part in parts),
    )


class PartWrite(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Gather a part and write it to `offset` of the ring of its decode rank. The rank reports one PartWritten.

    `pages` hold its tokens; the first token is token `start` of the first page. `size_bytes` is that of the grant.
    """

    instance: InstanceId
    part: StagePart
    offset: int
    size_bytes: int
    pages: list[int]
    start: int


class PartWritten(msgspec.Struct, array_like=True, frozen=True):
    """The result of a PartWrite. `ok`: all of the part is in the ring; other fields as in ChunkWritten."""

    instance: InstanceId
    part: StagePart
    ok: bool
    reason: str = ""
    late_writes: bool = False
    writes: int = 0
    bytes_written: int = 0
    transport_bytes: dict[str, int] = {}


class PartScatter(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Scatter the part at `offset` of the ring. Reported when it is in its pages and the ring has been read.

    `pages` receive its tokens; the first token is token `start` of the first page.
    """

    part: StagePart
    offset: int
    size_bytes: int
    pages: list[int]
    start: int


def joined_bytes(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of each transport."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
