"""Commands from the leader to its ranks, and the reports of the ranks.

Ranks run compute commands in order. Commands with a `command_id` are acknowledged (StepDone, CommandDone). A command
without one is complete when the next command with a `command_id` is. A command with a `copy` number starts in that
order and then runs beside the steps, until CopyDone (`decode/memory/background_copies.py`).

A single rank is a thread of the leader and gets these objects. Several ranks are processes and get them as msgpack,
with steps as SentStep.
"""

import msgspec

from ...common.sampling import Grammar
from ...memory.index_spaces import HotPage, KvPage, RequestSlot
from ...models.config.sharding import RankTokens
from ...transfer.data.chunks import ChunkWrite, ChunkWritten, PartScatter, PartWrite, PartWritten
from ...transfer.protocol.messages import ChunkArrived, Hello, InstanceId, Rank, StagePart, TransferKey, Welcome
from .step import Draw, StepResult, StepRow


class Command(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of the commands; the tag is the class name."""


class RunStep(Command, frozen=True):
    """Run a step; the rank that samples reports StepDone.

    With data-parallel attention, each rank of a stage has rows of its own, and `ranks` has the tokens of all of them.
    """

    command_id: int
    rows: tuple[StepRow, ...]
    ranks: tuple[RankTokens, ...] = ()


class AssistStep(Command, frozen=True):
    """Compute experts for a step in which only other data-parallel ranks have rows. Nothing is reported."""

    ranks: tuple[RankTokens, ...]


class SentRow(msgspec.Struct, array_like=True, frozen=True):
    """A row without its pages. The rank has the first `kept` of them in its page table `table`; `new_pages` follow."""

    row: StepRow
    table: int
    kept: int
    new_pages: list[int]


class SentStep(Command, frozen=True):
    """RunStep as rank processes get it; `ranks/page_tables.py` converts. Tables in `forgotten` are not used again."""

    command_id: int
    rows: tuple[SentRow, ...]
    forgotten: tuple[int, ...]
    ranks: tuple[RankTokens, ...] = ()


class CopyPage(Command, frozen=True):
    """Copy a page, or its first `tokens` tokens, in order with the steps. Whole pages: the last page of a prompt, for
    another sample. `tokens`: the start of a cached page, for a new prompt; prefill may write later tokens of the new
    page at the same time. Reported as CommandDone, by every rank.
    """

    command_id: int
    source: KvPage
    destination: KvPage
    tokens: int | None = None


class SavePages(Command, frozen=True):
    """Copy these pages to host memory under this rid (retraction). Reported as CopyDone, by every rank."""

    copy: int
    rid: str
    pages: tuple[KvPage, ...]


class LoadPages(Command, frozen=True):
    """Copy what was saved under this rid to these pages, and drop it. Reported as CopyDone, by every rank."""

    copy: int
    rid: str
    pages: tuple[KvPage, ...]


class DropPages(Command, frozen=True):
    """Drop what was saved under this rid, after the copy to host memory has ended."""

    rid: str


class OpenHot(Command, frozen=True):
    """Set up the hot buffer of a request or prompt (HiSparse).

    The rows of its first `tokens` tokens are in host memory, in `pages`. With a `copy` number, they are copied into the
    buffer, which is fully resident then; reported as CopyDone, by every rank. With `exact`, the copy does not touch
    rows after them in the last page: prefill writes these at the same time.
    """

    copy: int | None
    slot: RequestSlot
    hot_pages: tuple[HotPage, ...]
    pages: tuple[KvPage, ...]
    tokens: int
    capacity: int
    exact: bool = False


class ResizeHot(Command, frozen=True):
    """Change the pages and the capacity of a hot buffer."""

    slot: RequestSlot
    hot_pages: tuple[HotPage, ...]
    capacity: int


class WriteBackRows(Command, frozen=True):
    """Copy rows that prefill has written to a hot buffer into host memory, from the page of token `start` up to token
    `end` (HiSparse). Steps may write later rows meanwhile. Reported as CopyDone, by every rank.
    """

    copy: int
    hot_pages: tuple[HotPage, ...]
    pages: tuple[KvPage, ...]
    start: int
    end: int


class VerifyKv(Command, frozen=True):
    """Compare the KV that arrived in `pages` with the checksums of `chunks`. Latent rows are in `hot_pages`, if there
    are any, and not in host memory. Reported as KvVerified, by every rank.
    """

    key: TransferKey
    pages: list[KvPage]
    chunks: tuple[ChunkArrived, ...]
    hot_pages: tuple[HotPage, ...] = ()


class CheckCache(Command, frozen=True):
    """Check the tables of the cache; sent when the server is idle. Reported as CacheChecked, by every rank."""


class OpenPeer(Command, frozen=True):
    """A decode server paired: KV may be written to its ranks (prefill). `welcome` has our own layouts."""

    hello: Hello
    welcome: Welcome


class ClosePeer(Command, frozen=True):
    """The connection to a decode server is closed (prefill)."""

    instance: InstanceId


class CancelChunks(Command, frozen=True):
    """Stop writing for this transfer (prefill). Each chunk in flight still reports its end."""

    instance: InstanceId
    key: TransferKey


class PrepareGrammar(Command, frozen=True):
    """Compile a grammar before a step needs it. Reported as GrammarReady, by the rank that samples."""

    number: int
    grammar: Grammar


class DropGrammar(Command, frozen=True):
    """No request waits for this grammar any more: it is not compiled, unless that has begun."""

    number: int


class DropGrammarState(Command, frozen=True):
    """The request of this state (`Draw.grammar_state`) does not run any more. A state may hold many megabytes."""

    grammar_state: int


class PrepareMask(Command, frozen=True):
    """Compute the mask of a request's next token beside the steps, because its masks are slow. `token` is its newest
    output token, `draw` that of its next row. Reported as MaskReady, by the rank that samples.
    """

    number: int
    token: int
    draw: Draw


class StoreLoad(Command, frozen=True):
    """Load the first of these blocks that the KV store delivers within `timeout_s`; each lookup may take
    `lookup_timeout_s`. The blocks go to `pages`, from token `offset` on; the first `skip` tokens are in their pages
    already. The load begins in order with the steps, because earlier steps may access these pages, and runs beside
    later steps. Reported as StoreLoaded, by every rank.
    """

    number: int
    blocks: tuple[bytes, ...]
    pages: tuple[KvPage, ...]
    offset: int
    skip: int
    timeout_s: float
    lookup_timeout_s: float


class StoreWrite(Command, frozen=True):
    """Write those of these blocks to the KV store that it lacks. `pages` hold them from token `offset` on. Reported as
    StoreWritten, by every rank.
    """

    number: int
    blocks: tuple[bytes, ...]
    pages: tuple[KvPage, ...]
    offset: int


class StorePing(Command, frozen=True):
    """Connect to the KV store, or find out whether it answers again. Reported as StorePinged, by every rank."""


class LeaderAlive(Command, frozen=True):
    """Heartbeat: a rank on another machine exits when it gets nothing for LEADER_SILENCE_S."""


class StopRank(Command, frozen=True):
    """Exit."""


PageCommand = CopyPage | SavePages | LoadPages | DropPages
HotCommand = OpenHot | ResizeHot | WriteBackRows
StoreCommand = StoreLoad | StoreWrite | StorePing
InlineCommand = AssistStep | PageCommand | HotCommand | VerifyKv | CheckCache | StoreLoad | StopRank
ComputeCommand = RunStep | InlineCommand
"""Run by the compute thread, in order."""
GrammarCommand = PrepareGrammar | DropGrammar | DropGrammarState | PrepareMask
PartCommand = PartWrite | PartScatter
"""Commands for a single rank: the writer of a part, or its receiver."""
TransferCommand = (
    OpenPeer | ClosePeer | ChunkWrite | CancelChunks | PartCommand | GrammarCommand | StoreWrite | StorePing
)
"""Commands that do not wait for the steps sent before them. They run at once, in order among themselves. They are about
grammars, or about KV that is complete or that a named step (`ChunkWrite.after`) completes. A ChunkWrite goes to all
ranks: each writes its share of the chunk and reports a ChunkReport.
"""
RankCommand = SentStep | InlineCommand | TransferCommand | LeaderAlive
"""What is sent to rank processes."""


class Report(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of the reports; the tag is the class name."""

    rank: int


class RankReady(Report, frozen=True):
    """The weights are loaded and the KV cache exists. `peer_info` is what Hello and Welcome tell peers about this rank.
    `step_limit` is the largest step: in prompt tokens on prefill, in requests on decode. `device_kv_bytes` and
    `host_kv_bytes` are what the cache takes, tables included. The `hot_` fields are set with HiSparse.
    """

    peer_info: Rank
    num_pages: int
    step_limit: int
    dtype: str
    device: str
    weight_bytes: int
    device_kv_bytes: int
    host_kv_bytes: int
    hot_pages: int | None = None
    hot_rows: int | None = None


class RankFailed(Report, frozen=True):
    """The rank cannot start or cannot continue. With `startup` it is an error that the user can fix."""

    reason: str
    startup: bool = False


class StepDone(Report, frozen=True):
    """From the rank that samples: the results of a step, or its error. The KV of the step is complete on all ranks."""

    command_id: int
    results: tuple[StepResult, ...]
    error: str | None = None


class CommandDone(Report, frozen=True):
    """From every rank of the scheduler that sent it: a CopyPage is done."""

    command_id: int


class CopyDone(Report, frozen=True):
    """From every rank: a background copy has ended."""

    copy: int
    seconds: float


class KvVerified(Report, frozen=True):
    """From every rank: the number of chunks that it compared, and the first difference."""

    key: TransferKey
    chunks: int
    problem: str | None


class CacheChecked(Report, frozen=True):
    """From every rank: what is wrong with its cache, if anything."""

    problem: str | None


class ChunkReport(Report, frozen=True):
    """From every rank: its part of a chunk has ended."""

    written: ChunkWritten


class PartReport(Report, frozen=True):
    """From the rank that writes the part: the write has ended (prefill)."""

    written: PartWritten


class PartScattered(Report, frozen=True):
    """From the rank that receives the part: it is in its pages (decode)."""

    part: StagePart


class GrammarReady(Report, frozen=True):
    """From the rank that samples: a grammar is compiled, or why it cannot be. `slow`: its masks are."""

    number: int
    problem: str | None = None
    slow: bool = False


class MaskReady(Report, frozen=True):
    """From the rank that samples: a mask is computed. `slow`: the next one is to be prepared too. With a `problem`, the
    request fails, as with that of a StepResult.
    """

    number: int
    slow: bool = False
    problem: str | None = None
    too_complex: bool = False


class StoreLoaded(Report, frozen=True):
    """From every rank: the first `blocks` blocks of a StoreLoad are in its pages. `corrupt` cells had wrong bytes.
    `problem` says why the store cannot be used, if so. `late`: the store has not answered in time.
    """

    number: int
    blocks: int
    seconds: float
    size_bytes: int = 0
    corrupt: int = 0
    problem: str | None = None
    late: bool = False


class StoreWritten(Report, frozen=True):
    """From every rank: a StoreWrite has ended, and its pages are not read any more. The store did not accept `refused`
    blocks.
    """

    number: int
    blocks: int
    size_bytes: int
    problem: str | None = None
    refused: int = 0


class StorePinged(Report, frozen=True):
    """From every rank: why the KV store cannot be used, if so."""

    problem: str | None = None


class HotCounters(Report, frozen=True):
    """From the first rank of each stage, a few times a second: the totals of its hot buffers (HiSparse)."""

    counters: dict[str, float]


class PeerRoutes(Report, frozen=True):
    """How this rank writes to a decode server: the transport of each pool, and why others do not work (prefill)."""

    instance: InstanceId
    transports: dict[str, str]
    unusable: dict[str, str]


class RankAlive(Report, frozen=True):
    """Heartbeat, a few times a second. `problems` make the server unhealthy. `busy_s` is the time spent on steps, minus
    the time spent waiting for the previous pipeline stage.
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
    | GrammarReady
    | MaskReady
    | StoreLoaded
    | StoreWritten
    | StorePinged
    | HotCounters
    | PeerRoutes
    | RankAlive
)
