"""What the leader tells its ranks and what they report. Steps and page copies are carried out in the order of telling.

Rank 0 is a thread of the leader and gets these objects as they are; the others are processes, and get them as msgpack,
steps as SentStep.
"""

import msgspec

from ...memory.index_spaces import KvPage
from ...transfer.data.chunks import ChunkWrite, ChunkWritten, PartScatter, PartWrite, PartWritten
from ...transfer.protocol.messages import Hello, InstanceId, Rank, StagePart, TransferKey, Welcome
from .effects import CancelChunks, CopyPage, DropPages, LoadPages, OpenHot, ResizeHot, SavePages
from .step import StepResult, StepRow


class Command(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of what the leader tells its ranks, beside the page effects of a scheduler."""


class RunStep(Command, frozen=True):
    """Run a step; the rank that samples reports StepDone."""

    command_id: int
    rows: tuple[StepRow, ...]


class SentRow(msgspec.Struct, array_like=True, frozen=True):
    """A row without its pages: those are in a table of the rank, `kept` so far, and after them `new_pages`."""

    row: StepRow
    table: int
    kept: int
    new_pages: list[int]


class SentStep(Command, frozen=True):
    """RunStep as rank processes get it: page_tables.py makes one of the other. Tables in `forgotten` will not come up
    again.
    """

    command_id: int
    rows: tuple[SentRow, ...]
    forgotten: tuple[int, ...]


class ExpectedChunk(msgspec.Struct, array_like=True, frozen=True):
    """Tokens [token_start, token_end) of a transfer and the checksum that each decode rank should find."""

    token_start: int
    token_end: int
    checksums: tuple[int, ...]


class VerifyKv(Command, frozen=True):
    """Compare what landed in `pages` with what was sent. Reported as KvVerified, by every rank."""

    key: TransferKey
    pages: list[KvPage]
    chunks: tuple[ExpectedChunk, ...]


class CheckCache(Command, frozen=True):
    """The server is idle: see whether the tables of the cache are sound. Reported as CacheChecked, by every rank."""


class OpenPeer(Command, frozen=True):
    """A decode server paired: KV may be written to its ranks (prefill). `welcome` has the layouts of our own."""

    hello: Hello
    welcome: Welcome


class ClosePeer(Command, frozen=True):
    """A decode server is gone (prefill)."""

    instance: InstanceId


class WriteChunk(Command, frozen=True):
    """Write this rank's part of a chunk that is computed (prefill). Reported as ChunkReport, by every rank."""

    chunk: ChunkWrite


class LeaderAlive(Command, frozen=True):
    """Sent now and then: a rank on another machine that hears nothing ends."""


class StopRank(Command, frozen=True):
    """End this rank."""


PageCommand = CopyPage | SavePages | LoadPages | DropPages
InlineCommand = PageCommand | OpenHot | ResizeHot | VerifyKv | CheckCache | StopRank
ComputeCommand = RunStep | InlineCommand
"""Carried out by the thread that computes, in order."""
PartCommand = PartWrite | PartScatter
"""For one rank, that which writes the part or takes it."""
TransferCommand = OpenPeer | ClosePeer | WriteChunk | CancelChunks | PartCommand
"""About KV that is complete: carried out at once, in order among themselves."""
RankCommand = SentStep | InlineCommand | TransferCommand | LeaderAlive
"""What travels to rank processes."""


class Report(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of what ranks report."""

    rank: int


class RankReady(Report, frozen=True):
    """Loaded, with its KV in place. `place` is what peers need to know of it; `hot_pages` there are with HiSparse.
    `step_limit` is the most that a step may hold: prompt tokens on prefill, requests on decode.
    """

    place: Rank
    num_pages: int
    step_limit: int
    dtype: str
    device: str
    hot_pages: int | None = None
    hot_rows: int | None = None


class RankFailed(Report, frozen=True):
    """The rank cannot start or go on; `startup` when the user can mend it."""

    reason: str
    startup: bool = False


class StepDone(Report, frozen=True):
    """From the rank that samples: the results of a step, whose KV is complete on all ranks, or why it failed."""

    command_id: int
    results: tuple[StepResult, ...]
    error: str | None = None


class CommandDone(Report, frozen=True):
    """From every rank: a page was copied to another."""

    command_id: int


class CopyDone(Report, frozen=True):
    """From every rank: a copy beside the steps has ended."""

    copy: int
    seconds: float


class KvVerified(Report, frozen=True):
    """From every rank: how many chunks it compared, and the first difference."""

    key: TransferKey
    chunks: int
    problem: str | None


class CacheChecked(Report, frozen=True):
    """From every rank: what is wrong with its cache; None when nothing is."""

    problem: str | None


class ChunkReport(Report, frozen=True):
    """From every rank: its part of a chunk has ended."""

    written: ChunkWritten


class PartReport(Report, frozen=True):
    """From the rank that writes it: a staged part has ended (prefill)."""

    written: PartWritten


class PartScattered(Report, frozen=True):
    """From the rank that takes it: a staged part is in its pages (decode)."""

    part: StagePart


class HotCounters(Report, frozen=True):
    """From the first rank of each stage, now and then: what its hot buffers have seen so far (HiSparse)."""

    counters: dict[str, float]


class PeerRoutes(Report, frozen=True):
    """How this rank's KV goes to a decode server: a transport for each pool, and why others do not work (prefill)."""

    instance: InstanceId
    transports: dict[str, str]
    unusable: dict[str, str]


class RankAlive(Report, frozen=True):
    """Sent a few times a second; `problems` make the server unhealthy. `busy_s` is the time spent on steps, less that
    spent waiting for the stage before.
    """

    problems: tuple[str, ...] = ()
    busy_s: float = 0.0


RankReport = (
    RankReady
    | RankFailed
    | StepDone
    | CommandDone
    | CopyDone
    | KvVerified
    | CacheChecked
    | ChunkReport
    | PartReport
    | PartScattered
    | HotCounters
    | PeerRoutes
    | RankAlive
)
