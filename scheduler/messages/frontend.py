"""Messages between the frontend (the HTTP process) and the leader process of a server (one local ZMQ PAIR).

The frontend handles text and HTTP, the leader token ids. Every request of a Submit gets exactly one terminal message,
`Finished` or `Failed`. Messages to the frontend are sent in batches: a decode step has one for each of its requests,
and single sends would cost more than the content.
"""

from typing import Literal

import msgspec

from ...common.sampling import NO_LOGPROBS, LogprobParams, SamplingParams, TokenLogprob


class FrontendMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the tag is the class name."""


class Submit(FrontendMessage, frozen=True):
    """Generate for this prompt (decode). `endpoint` selects the prefill server: HOST:PORT of its control port.

    Each of `more_rids` is a further sample of the same prompt, with seed + 1, + 2, ...: they share prefill and
    transfer, and are separate requests after that, each with its own terminal message. A higher `priority` is served
    first. `slo_ttft_ms` and `slo_itl_ms` replace the limits of the server. `client` is the address of the HTTP client.
    A call with several prompts sends one Submit each, in a row; `follows` is the rid of the first one. If the first was
    accepted, the others are accepted too. `traceparent` (W3C) is the span of the request, if it is traced.
    `page_hashes` are the short hashes of its pages, packed, by page size (memory/page_hashes.py), for those that
    `Status` asks for.
    """

    rid: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    endpoint: str | None = None
    room: int | None = None
    timeout_s: float | None = None
    more_rids: tuple[str, ...] = ()
    logprobs: LogprobParams | None = None
    priority: int = 0
    slo_ttft_ms: float | None = None
    slo_itl_ms: float | None = None
    client: str = ""
    follows: str | None = None
    traceparent: str | None = None
    page_hashes: dict[int, bytes] = {}


class Cancel(FrontendMessage, frozen=True):
    """End a request with `Failed` (aborted); ignored if it has ended.

    With `stopped`, the frontend has found a stop string: the request ends with `Finished`.
    """

    rid: str
    stopped: bool = False


class FlushCache(FrontendMessage, frozen=True):
    """Drop all cached prefixes."""


class Stop(FrontendMessage, frozen=True):
    """Refuse new requests, wait up to `drain_s` for open ones, fail the rest, then exit."""

    drain_s: float


class ModelInfo(FrontendMessage, frozen=True):
    """What the frontend needs to know about the model to validate requests."""

    name: str
    path: str
    architecture: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    dtype: str
    device: str


class RankInfo(msgspec.Struct, frozen=True):
    """One rank: its layers and KV heads (half-open), the transports on which it receives KV (decode), and the
    memory of its weights and of its KV cache.
    """

    rank: int
    device: str
    layers: tuple[int, int]
    kv_heads: tuple[int, int]
    transports: tuple[str, ...]
    weight_bytes: int
    device_kv_bytes: int
    host_kv_bytes: int


class Ready(FrontendMessage, frozen=True):
    """The leader accepts requests. `max_total_tokens` is the longest prompt + output that fits the KV pool."""

    model: ModelInfo
    instance: str
    page_size: int
    num_pages: int
    max_total_tokens: int
    ranks: tuple[RankInfo, ...] = ()
    chosen: dict[str, int] = {}
    """Settings that were chosen automatically, with their values."""


class StartupFailed(FrontendMessage, frozen=True):
    """The leader cannot start and exits with code 2."""

    message: str


class Tokens(FrontendMessage, frozen=True):
    """New output tokens of one request, in order, with their log-probabilities if requested."""

    rid: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Prefilled(FrontendMessage, frozen=True):
    """The prompt has been computed; sent before the first Tokens.

    `cached_tokens` of it were not computed: the server that computed the prompt had them in its prefix cache, or loaded
    them from the KV store (`stored_tokens` of them). `input_logprobs` are those of `PrefillDone`.
    """

    rid: str
    cached_tokens: int
    input_logprobs: msgspec.Raw = NO_LOGPROBS
    stored_tokens: int = 0
    host_tokens: int = 0
    """The part of `cached_tokens` that was in host memory."""


class FinishReason(msgspec.Struct, frozen=True):
    """Why a request is complete. `stop`: `matched` is the token that ended it, or None if the frontend found a stop
    string. `length`: it has reached `length` tokens.
    """

    type: Literal["stop", "length"]
    matched: int | None = None
    length: int | None = None


class Finished(FrontendMessage, frozen=True):
    """Terminal: the request is complete. `timeline` maps stage names to seconds, in order. `kv_path` is how the KV of
    its prompt got here: computed here ("local"), or written by prefill to "device" or "host" memory.
    """

    rid: str
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timeline: dict[str, float]
    kv_path: str = ""
    stored_tokens: int = 0
    """The part of `cached_tokens` that came from the KV store."""
    host_tokens: int = 0
    """The part of `cached_tokens` that was in host memory."""


class Failed(FrontendMessage, frozen=True):
    """Terminal: the request has failed. `status` is the HTTP status, `code` the error code."""

    rid: str
    status: int
    code: str
    message: str
    retry_after_s: float | None = None


class PromptSent(FrontendMessage, frozen=True):
    """A traced prompt has been computed and sent (prefill). `transfer_s` is the time after its last step."""

    rid: str
    traceparent: str
    prompt_tokens: int
    cached_tokens: int
    chunks: int
    bytes_written: int
    queue_s: float
    compute_s: float
    transfer_s: float


class PeerStatus(msgspec.Struct, frozen=True):
    """The connection to one peer server."""

    endpoint: str
    state: Literal["connecting", "paired", "refused", "lost"]
    instance: str | None = None
    detail: str | None = None
    round_trip_ms: float | None = None
    transports: dict[str, str] = {}
    """The transport of each pool (prefill)."""
    unusable_transports: dict[str, str] = {}
    """Transports that should work between the two servers but do not, and why (prefill)."""
    transports_since: float | None = None
    """When these transports were chosen, in Unix time (prefill)."""
    tokens_ahead: int | None = None
    """Tokens that the server computes before a prompt that is sent now (decode)."""
    cached_tokens: int | None = None
    """Tokens in its prefix cache; None if it does not report them (decode)."""
    shares_device: bool | None = None
    """It computes on the GPU or the CPU cores that this server computes on (decode)."""
    address: str | None = None
    """Its IP address, if `endpoint` has a host name, which may stand for several servers (decode)."""
    rdma_ports: dict[str, str] = {}
    """The states of the RDMA devices of its machine, by name."""


class DpRankStatus(msgspec.Struct, frozen=True):
    """Gauges of one data-parallel rank, and its requests in each state."""

    dp_rank: int
    gauges: dict[str, float]
    states: dict[str, int]


class Status(FrontendMessage, frozen=True):
    """Gauges and counters of the leader by metric name, its peers, and the number of requests in each state.

    Sent a few times a second. `loop_age_s` is the age of the last turn of the engine loop, `step_age_s` that of the
    step that the ranks compute; `problems` make the server unhealthy. `taken_at` is the Unix time of gauges, counters
    and states, which are those of all data-parallel ranks together; `dp_ranks` has each of them, if there are several.
    Prompts are hashed for `hashed_page_sizes`, to find the prefill server that has their prefix.
    """

    gauges: dict[str, float]
    counters: dict[str, float]
    peers: tuple[PeerStatus, ...]
    states: dict[str, int]
    taken_at: float
    loop_age_s: float
    step_age_s: float = 0.0
    problems: tuple[str, ...] = ()
    dp_ranks: tuple[DpRankStatus, ...] = ()
    hashed_page_sizes: tuple[int, ...] = ()
    kv_store_problem: str | None = None
    """Why the KV store is not used at present; None also without one."""


ToLeader = Submit | Cancel | FlushCache | Stop
ToFrontend = Ready | StartupFailed | Tokens | Prefilled | Finished | Failed | PromptSent | Status
ToFrontendBatch = list[ToFrontend]
"""The content of one ZMQ message, in order."""
