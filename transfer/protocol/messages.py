"""All control messages between a decode leader and a prefill leader, and how they stay compatible.

Messages are array-encoded msgpack: `[tag, field, field, ...]`. **Fields are only ever appended, each with a default.**
A decoder fills missing trailing fields with their defaults and ignores extra ones, so an older and a newer peer are
compatible. A change that is not an append bumps PROTOCOL_VERSION, and peers of different versions refuse each other at
pairing. Large integer arrays (prompt, indices) are sent as raw little-endian frames behind the message.

History
  1  first version; `enable_hisparse` trails Hello, Welcome and KvDestination.
  2  ChunkArrived has a checksum per decode rank instead of one; KvDestination has a third frame. Appended: `ring` and
     `staging` to Rank, and the messages of the staged path.
  3  KvDestination has `priority`, before `enable_hisparse`, which trails. Appended: `leaving` and `full` to
     TransferFailed, `accepting`, `window_tokens` and `tokens_per_s` to Load, `probe_address` and `probe_bytes` to Pool
     and StageRing. Later: `hot` to Rank, a third frame to KvDestination, and a meaning to `enable_hisparse` of Welcome
     and KvDestination; `cache_reports` to Load, which asks for the new message CachedPrefixes; a fourth and
     a fifth frame to KvDestination; `checkpoint` and `gpu` to Rank.

Directions (P prefill, D decode):
  D -> P  Hello, KvDestination, Abort, StageGrant, StageFree
  P -> D  Welcome, ChunkArrived, PrefillDone, TransferFailed, AbortAck, CachedPrefixes
          StageRequest, StageArrived, StageStopped
  both    Heartbeat, HeartbeatAck, Refused

A transfer is identified by (transfer_id, generation): decode assigns the id, and a retry of the same request into new
pages is the next generation. Messages of another generation are stale and ignored.

Where prefill and decode shard heads differently, KV goes through a staging ring in decode's memory
(`staged_regions.py`). A part goes StageRequest -> StageGrant -> (one write) -> StageArrived -> (scatter) -> StageFree.
A part that is aborted goes StageStopped -> StageFree from any state. Prefill servers of earlier versions wait for
StageFree and repeat their last message until it comes; then the part may have ended here.
"""

from typing import Literal, NewType

import msgspec

from ...common.sampling import NO_LOGPROBS, LogprobParams, SamplingParams, TokenLogprob
from ...configs.setting_types import StagingSetting
from .layout import KvLayout

PROTOCOL_VERSION = 3

InstanceId = NewType("InstanceId", str)
"""A uuid created at process start. A restarted server is a new instance."""
_DP_MARK = "-dp"


def dp_instance(instance: InstanceId, dp_rank: int) -> InstanceId:
    """The instance of a data-parallel rank of a decode server. Peers see each rank as a decode server of its own."""
    return InstanceId(f"{instance}{_DP_MARK}{dp_rank}")


def split_dp_instance(instance: InstanceId) -> tuple[InstanceId, int]:
    """The instance of the server, and the number of the data-parallel rank; 0 for an instance without a number."""
    server, mark, number = instance.rpartition(_DP_MARK)
    return (InstanceId(server), int(number)) if mark and number.isdecimal() else (instance, 0)


KvPath = Literal["device", "host"]
"""Where prefill writes the KV rows of a request: a pool on the device that computes, or the pool in host memory of a
HiSparse server. Indexer keys are always on the device.
"""


class TransferKey(msgspec.Struct, array_like=True, frozen=True):
    """Identifies one attempt to transfer the KV of one request to one decode server."""

    transfer_id: int
    generation: int

    def __str__(self) -> str:
        return f"{self.transfer_id}.{self.generation}"


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of all control messages; the tag is the class name."""


class Pool(msgspec.Struct, array_like=True, frozen=True):
    """A KV pool as its owner registered it: writes outside [base_address, base_address + size_bytes) are refused.

    Pools of the two sides correspond if they have the same planes. All pools of a decode rank share their pages:
    an index of a KvDestination is the same page in each of them, in device or host memory.
    """

    layout: KvLayout
    base_address: int
    size_bytes: int
    memory: Literal["device", "host"] = "device"
    probe_address: int = 0
    """Where prefill may write at any time to test a transport (`probe.py`): registered with the pool, outside of it."""
    probe_bytes: int = 0


class StageRing(msgspec.Struct, array_like=True, frozen=True):
    """The staging ring of a decode rank. `epoch` is a random number, for peers of earlier versions: the connection
    tells the rings of two processes apart.
    """

    base_address: int
    size_bytes: int
    epoch: int
    memory: Literal["device", "host"] = "device"
    probe_address: int = 0
    probe_bytes: int = 0


class Rank(msgspec.Struct, array_like=True, frozen=True):
    """One rank of a server. `session` is the address of its receive engine (TCP); None if it receives nothing.

    `nvlink_session` is a second engine, for writes between GPUs of the same `machine`, and `rdma_session` a third, if
    the rank has a working HCA. All of them accept writes into the `ring`, too, which decode ranks have unless `staging`
    of their server is off.
    """

    rank: int
    session: str | None
    pools: tuple[Pool, ...]
    machine: str = ""
    nvlink_session: str | None = None
    rdma_session: str | None = None
    ring: StageRing | None = None
    staging: StagingSetting = "off"
    hot: Pool | None = None
    """The hot pool of a HiSparse rank, on its GPU: latent rows of a request go there or to the pool in host memory, as
    its KvDestination says. Pages are numbered on their own.
    """
    cpu_cores: tuple[int, ...] = ()
    """The cores of `machine` that it may use, if it computes on the CPU."""
    cpu_threads: int = 0
    """Its threads, if it computes on the CPU."""
    checkpoint: str = ""
    """The fingerprint of the model that it has loaded (models/loading/fingerprint.py); empty from an older server, with
    which `model_fingerprint` decides.
    """
    gpu: str = ""
    """The UUID of the GPU that it computes on; empty from an older server, and on a CPU."""


class _Introduction(Message, frozen=True):
    protocol_version: int
    instance: InstanceId
    model_fingerprint: str
    model_name: str
    ranks: tuple[Rank, ...]
    enable_hisparse: bool = False


class Hello(_Introduction, frozen=True):
    """Decode introduces itself. Sent on every connection, and again after Refused(unknown_peer)."""


class Welcome(_Introduction, frozen=True):
    """Prefill accepts the pair. With `enable_hisparse` it writes latent rows to host memory or to the hot pool, as each
    KvDestination says; an older server writes them to host memory only.
    """


class Refused(Message, frozen=True):
    """`unknown_peer` asks for a Hello; for `mismatch` and `malformed`, `reason` is one sentence for the operator."""

    code: Literal["unknown_peer", "mismatch", "malformed"]
    reason: str


class KvDestination(Message, frozen=True):
    """Compute this prompt and write its KV here. Frames of int32: prompt ids, destination indices, hot indices, trace,
    deadline.

    Indices are pages of decode's pools or, with `granularity="token"`, one row per token. Tokens [0, prefix_tokens) are
    already on decode, or behind the sliding window of its first step; the indices start at token `prefix_tokens`.
    `enable_hisparse` decides where latent rows go if decode has announced a hot pool: with it into host memory, to the
    same indices as the rest; without it into the hot pool, to the hot indices. There are no hot indices otherwise.
    `timeout_s` is the time left until the request's deadline. `samples` first tokens are sampled, the i-th with seed +
    i. The last `output_tokens` of the ids are already output: a request that lost its KV on decode is computed again,
    and its "first" token is the next one. Waiting prompts with a higher `priority` are served first. The trace frame
    is the `traceparent` (W3C) of the request, as bytes, if the request is traced. The deadline frame has the
    milliseconds since the prompt arrived on decode, from which the deadline of its first token counts, and the
    request's own limit on the time to that token, or 0.
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
    """KV of tokens [token_start, token_end) is in decode's memory. Sent after every write of the chunk has ended.

    `checksums` has one sum per decode rank, over its share of these tokens (`checksum.py`); it is empty unless decode
    asked for it. A message with no tokens reports that the prompt has begun, if its first chunk takes long or is not
    sent; there is none if decode asks for checksums.
    """

    key: TransferKey
    token_start: int
    token_end: int
    checksums: tuple[int, ...] = ()


class PrefillDone(Message, frozen=True):
    """All KV is written; carries the first token of each sample and the times spent on prefill.

    `cached_tokens` of the prompt came from prefill's prefix cache, the last `stored_tokens` of them from the KV store.
    `input_logprobs`, if requested, is an array (`pack_logprobs`) with one entry per prompt token from
    `LogprobParams.start` on. `json_rules` is the
    version of the grammars (common/sampling.py) with which the tokens were sampled.
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
    input_logprobs: msgspec.Raw = NO_LOGPROBS
    stored_tokens: int = 0
    json_rules: int = 0


class TransferFailed(Message, frozen=True):
    """No more writes will be issued.

    `late_writes`: bytes already sent may still land for a while. `refused`: the transfer was never started, so another
    server may accept it, or this one later. `full`: the server is overloaded but healthy. `leaving`: it accepts no more
    transfers, because it is shutting down or has lost a rank or its frontend. `too_complex`: the grammar of the request
    has become too expensive, with `reason`.
    """

    key: TransferKey
    reason: str
    retryable: bool
    late_writes: bool = False
    refused: bool = False
    leaving: bool = False
    full: bool = False
    too_complex: bool = False


class Abort(Message, frozen=True):
    """Decode aborts the transfer; its pages stay reserved until the AbortAck."""

    key: TransferKey
    reason: str


class AbortAck(Message, frozen=True):
    """No more writes of this transfer will be issued; `late_writes` as in TransferFailed."""

    key: TransferKey
    late_writes: bool = False


class CachedPrefixes(Message, frozen=True):
    """What has changed in the prefix cache of a prefill server, or of one of its data-parallel ranks: `removed` first,
    then `added`. With `reset`, nothing else is cached any more. Sent only to decode servers that ask for it.

    Pages are named by the first 64 bits of their chained hashes (memory/page_hashes.py), as little-endian integers.
    Only every `stride`-th page of a sequence is reported.
    """

    dp_rank: int
    page_size: int
    stride: int
    added: bytes = b""
    removed: bytes = b""
    reset: bool = False


class HeadSlice(msgspec.Struct, array_like=True, frozen=True):
    """The layers and heads of a copy region: half-open ranges, global."""

    layer_start: int
    layer_end: int
    head_start: int
    head_end: int

    @property
    def cells(self) -> int:
        """Heads over all layers."""
        return (self.layer_end - self.layer_start) * (self.head_end - self.head_start)


class StagePart(msgspec.Struct, array_like=True, frozen=True):
    """The content of one write into a ring: tokens [token_start, token_end) of a block, from one rank to another.

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
    """Prefill requests a region in the ring of decode rank `part.destination`, before it computes the part."""

    part: StagePart
    size_bytes: int


class StageGrant(Message, frozen=True):
    """[offset, offset + size_bytes of the request) of the ring is this part's until StageArrived or StageStopped."""

    part: StagePart
    region: int
    offset: int


class StageArrived(Message, frozen=True):
    """The part is completely written to its region."""

    part: StagePart
    region: int


class StageStopped(Message, frozen=True):
    """The part is aborted and no write of it will be issued. With `late_writes`, bytes in flight may still land."""

    part: StagePart
    late_writes: bool = False


class StageFree(Message, frozen=True):
    """The part has ended on decode: scattered, aborted or unknown."""

    part: StagePart


StageMessage = StageRequest | StageGrant | StageArrived | StageStopped | StageFree


class Load(msgspec.Struct, array_like=True, frozen=True):
    """The load of a server. Decode uses that of prefill servers to choose one for a prompt, and to bound the tokens
    that it sends ahead. A server that is not `accepting` takes no more prompts: it finishes its requests and shuts
    down.

    `running_requests` are in a running step, `waiting_requests` are not. Together they have `waiting_tokens` that are
    not computed yet. `window_tokens` is how many tokens a prefill server wants to have waiting, so that it does not
    idle until the next prompt arrives. `tokens_per_s` is how fast it computes prompts; 0 if it has computed none. A
    decode server with `cache_reports` wants CachedPrefixes messages, which older versions cannot read.
    """

    waiting_requests: int = 0
    running_requests: int = 0
    waiting_tokens: int = 0
    accepting: bool = True
    window_tokens: int = 0
    tokens_per_s: float = 0.0
    cache_reports: bool = False


class _Beat(Message, frozen=True):
    """`rdma_ports` are the states of the RDMA devices of the server's machine, by name; older versions send none."""

    instance: InstanceId
    sent_at: float
    load: Load = Load()
    rdma_ports: dict[str, str] = {}


class Heartbeat(_Beat, frozen=True):
    """`sent_at` is the sender's monotonic clock, echoed in the ack to measure the round trip."""


class HeartbeatAck(_Beat, frozen=True):
    """The answer, with `sent_at` of the heartbeat."""


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
    | CachedPrefixes
    | StageMessage
    | Heartbeat
    | HeartbeatAck
)
