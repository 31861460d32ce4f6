"""Every control message between a decode leader and a prefill leader, and the rule that keeps them compatible.

Messages are array-encoded msgpack: `[tag, field, field, ...]`. **Fields are only ever appended, each with a default.**
A decoder fills missing trailing fields with their defaults and ignores extra ones, so an older and a newer peer
understand each other. A change that is not an append bumps PROTOCOL_VERSION, and peers of different versions refuse
each other at pairing. Large integer arrays (prompt, indices) travel as raw little-endian frames behind the message.

History
  1  first version; `enable_hisparse` trails Hello, Welcome and KvDestination.
  2  ChunkArrived has a checksum per decode rank instead of one; KvDestination has a third frame. Appended: `ring` and
     `staging` to Rank, and the messages of the staged path.
  3  KvDestination has `priority`, before `enable_hisparse`, which trails. Appended: `leaving` and `full` to
     TransferFailed, `accepting` and `window_tokens` to Load, `probe_address` and `probe_bytes` to Pool and StageRing.

Who sends what (P prefill, D decode):
  D -> P  Hello, KvDestination, Abort, StageGrant, StageFree
  P -> D  Welcome, Refused, ChunkArrived, PrefillDone, TransferFailed, AbortAck
          StageRequest, StageArrived, StageStopped
  both    Heartbeat, HeartbeatAck

A transfer is named by (transfer_id, generation): decode mints the id, and a retry of the same request into fresh pages
is the next generation. A message of another generation is stale and ignored.

Where prefill and decode share heads out differently, KV goes through a ring in decode's memory (`staged_regions.py`). A
part goes StageRequest -> StageGrant -> (one write) -> StageArrived -> (scatter) -> StageFree. A part that is given up
goes to StageStopped -> StageFree from wherever it is. A part is named by its content and by the life of the ring it is
for, so every message can be repeated or late: the same request is answered with the same region, and what concerns a
part that is over, or of an earlier life, is answered with StageFree.
"""

from typing import Literal, NewType

import msgspec

from ...configs.sampling import LogprobParams, SamplingParams, TokenLogprob
from ...configs.schema import StagingSetting
from .layout import KvLayout

PROTOCOL_VERSION = 3

InstanceId = NewType("InstanceId", str)
"""A uuid made at process start. A restarted server is a new instance."""


class TransferKey(msgspec.Struct, array_like=True, frozen=True):
    """Names one attempt to bring one request's KV to one decode server."""

    transfer_id: int
    generation: int

    def __str__(self) -> str:
        return f"{self.transfer_id}.{self.generation}"


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of all control messages; the tag is the class name."""


class Pool(msgspec.Struct, array_like=True, frozen=True):
    """A KV pool as its owner registered it: writes outside [base_address, base_address + size_bytes) are refused.

    Pools of the two sides belong together when they have the same planes. All pools of a decode rank share their pages:
    an index of a KvDestination means the same page of each, wherever their memory is.
    """

    layout: KvLayout
    base_address: int
    size_bytes: int
    memory: Literal["device", "host"] = "device"
    probe_address: int = 0
    """Where prefill may write at any time to try a transport (`probe.py`): registered with the pool, outside of it."""
    probe_bytes: int = 0


class StageRing(msgspec.Struct, array_like=True, frozen=True):
    """Memory of a decode rank for what is staged. `epoch` tells it from an earlier one at the same address."""

    base_address: int
    size_bytes: int
    epoch: int
    memory: Literal["device", "host"] = "device"
    probe_address: int = 0
    probe_bytes: int = 0


class Rank(msgspec.Struct, array_like=True, frozen=True):
    """One rank of a server. `session` is where its receive engine listens (TCP); None where it receives nothing.

    `nvlink_session` is that of a second engine, which writes between GPUs of the same `machine` go to, and
    `rdma_session` that of a third, where the rank has an HCA that works. All of them take writes into the `ring`, too,
    which decode ranks have unless their server's `staging` is off.
    """

    rank: int
    session: str | None
    pools: tuple[Pool, ...]
    machine: str = ""
    nvlink_session: str | None = None
    rdma_session: str | None = None
    ring: StageRing | None = None
    staging: StagingSetting = "off"


class Hello(Message, frozen=True):
    """Decode introduces itself. Sent on every connection, and again when prefill says it does not know us."""

    protocol_version: int
    instance: InstanceId
    model_fingerprint: str
    model_name: str
    ranks: tuple[Rank, ...]
    enable_hisparse: bool = False


class Welcome(Message, frozen=True):
    """Prefill accepts the pair."""

    protocol_version: int
    instance: InstanceId
    model_fingerprint: str
    model_name: str
    ranks: tuple[Rank, ...]
    enable_hisparse: bool = False


class Refused(Message, frozen=True):
    """`unknown_peer` asks for a Hello; `mismatch` and `malformed` say in one sentence what is wrong."""

    code: Literal["unknown_peer", "mismatch", "malformed"]
    reason: str


class KvDestination(Message, frozen=True):
    """Compute this prompt and write its KV here. Frames, both int32: prompt ids, destination indices.

    Indices are pages of decode's pools or, with `granularity="token"`, one row per token. Tokens [0, prefix_tokens) are
    already on decode; the indices start at token `prefix_tokens`. With `enable_hisparse` the pool of latent rows among
    them is in host memory; to prefill that makes no difference but in the transport.
    `timeout_s` is what is left of the request's deadline when the message is sent. `samples` first tokens are drawn,
    the i-th with seed + i. The last `output_tokens` of the ids are output already: a request that lost its KV on decode
    is computed anew, and its "first" token is the next one. Of those that wait, the higher `priority` is served first.
    """

    key: TransferKey
    rid: str
    sampling: SamplingParams
    timeout_s: float
    granularity: Literal["page", "token"] = "page"
    prefix_tokens: int = 0
    room: int | None = None
    verify: bool = False
    samples: int = 1
    output_tokens: int = 0
    logprobs: LogprobParams | None = None
    priority: int = 0
    enable_hisparse: bool = False


class ChunkArrived(Message, frozen=True):
    """KV of tokens [token_start, token_end) is in decode's memory. Sent after every write of the chunk is terminal.

    `checksums` has one sum per decode rank, over all that the rank holds of these tokens (`checksum.py`); it is empty
    unless decode asked for it. A message about no tokens at all says that the first chunk is being computed, where that
    takes long; it is not sent where decode asks for checksums.
    """

    key: TransferKey
    token_start: int
    token_end: int
    checksums: tuple[int, ...] = ()


class PrefillDone(Message, frozen=True):
    """All KV has arrived; carries the first token of each sample and where prefill spent its time.

    `cached_tokens` of the prompt were not computed but found in prefill's prefix cache. `input_logprobs` is there when
    asked for: one entry per prompt token from `LogprobParams.start` on.
    """

    key: TransferKey
    first_tokens: tuple[TokenLogprob, ...]
    prompt_tokens: int
    chunks: int
    writes: int
    bytes_written: int
    queue_s: float
    compute_s: float
    transfer_tail_s: float
    cached_tokens: int = 0
    input_logprobs: tuple[TokenLogprob, ...] = ()


class TransferFailed(Message, frozen=True):
    """No more writes will be issued. With `late_writes`, bytes already on their way may still land for a while. With
    `refused` it was never begun: another server may take it, or this one later. With `full` the server has too much to
    do, and is otherwise well. With `leaving` it will take none any more: it is shutting down, or has lost a rank or its
    frontend.
    """

    key: TransferKey
    reason: str
    retryable: bool
    late_writes: bool = False
    refused: bool = False
    leaving: bool = False
    full: bool = False


class Abort(Message, frozen=True):
    """Decode gives the transfer up; its pages stay reserved until the AbortAck."""

    key: TransferKey
    reason: str


class AbortAck(Message, frozen=True):
    """The writer of this transfer has stopped for good; `late_writes` as in TransferFailed."""

    key: TransferKey
    late_writes: bool = False


class HeadSlice(msgspec.Struct, array_like=True, frozen=True):
    """The layers and heads of a link: half-open ranges, global."""

    layer_start: int
    layer_end: int
    head_start: int
    head_end: int

    @property
    def cells(self) -> int:
        """Heads over all layers."""
        return (self.layer_end - self.layer_start) * (self.head_end - self.head_start)


class StagePart(msgspec.Struct, array_like=True, frozen=True):
    """What one write into a ring carries: tokens [token_start, token_end) of a block, from one rank to another.

    `epoch` is that of the destination's ring, from its Hello.
    """

    epoch: int
    key: TransferKey
    writer: int
    destination: int
    block: HeadSlice
    token_start: int
    token_end: int

    @property
    def tokens(self) -> int:
        return self.token_end - self.token_start

    def __str__(self) -> str:
        return f"tokens [{self.token_start}, {self.token_end}) of transfer {self.key} from rank {self.writer}"


class StageRequest(Message, frozen=True):
    """Prefill asks for room in the ring of decode rank `part.destination`, ahead of computing the part."""

    part: StagePart
    size_bytes: int


class StageGrant(Message, frozen=True):
    """[offset, offset + size_bytes of the request) of the ring belongs to this part until its writer's last word."""

    part: StagePart
    region: int
    offset: int


class StageArrived(Message, frozen=True):
    """The part is in its region, complete, and its writer is done with it."""

    part: StagePart
    region: int


class StageStopped(Message, frozen=True):
    """The part will not come: its writer writes nothing more. With `late_writes`, bytes under way may still land."""

    part: StagePart
    late_writes: bool = False


class StageFree(Message, frozen=True):
    """The part is over on decode: scattered, given up or unknown. What was granted for it is the writer's no more."""

    part: StagePart


StageMessage = StageRequest | StageGrant | StageArrived | StageStopped | StageFree


class Load(msgspec.Struct, array_like=True, frozen=True):
    """How busy a server is; decode picks the prefill with the fewest tokens waiting. One that is not `accepting` takes
    no more prompts, ever: it finishes those that it has, and ends.

    `waiting_requests` have nothing in a step under way, `running_requests` have. `waiting_tokens` of both are not
    computed. `window_tokens` is how many of those a prefill server wants to have of each decode server, so that it
    never waits for the next prompt.
    """

    waiting_requests: int = 0
    running_requests: int = 0
    waiting_tokens: int = 0
    accepting: bool = True
    window_tokens: int = 0


class Heartbeat(Message, frozen=True):
    """I am alive. `sent_at` is the sender's monotonic clock, echoed in the ack for the round trip."""

    instance: InstanceId
    sent_at: float
    load: Load = Load()


class HeartbeatAck(Message, frozen=True):
    instance: InstanceId
    sent_at: float
    load: Load = Load()


AnyMessage = (
    Hello
    | Welcome
    | Refused
    | KvDestination
    | ChunkArrived
    | PrefillDone
    | TransferFailed
    | Abort
    | AbortAck
    | StageMessage
    | Heartbeat
    | HeartbeatAck
)
