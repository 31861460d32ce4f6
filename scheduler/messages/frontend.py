"""Messages between a server's HTTP front process and its leader engine process (one local ZMQ PAIR).

The front speaks text and HTTP, the leader token ids. Every Submit is answered by exactly one terminal message,
`Finished` or `Failed`, whatever happens in between. To the front they travel in batches: a decode step has a message
for each of its requests, and to send them one by one costs more than what is in them.
"""

from typing import Literal

import msgspec

from ...configs.sampling import LogprobParams, SamplingParams, TokenLogprob


class FrontendMessage(msgspec.Struct, frozen=True, tag=True):
    """Base; the tag is the class name."""


class Submit(FrontendMessage, frozen=True):
    """Generate for this prompt (decode). `endpoint` pins the prefill server: HOST:PORT of its control port.

    Each of `more_rids` is a further sample of the same prompt, with seed + 1, + 2, ...: one prefill, one transfer, and
    a request of its own from then on, with its own tokens and its own terminal message. The request with the higher
    `priority` is served first. `client` is the address that the request came from. `follows` is the rid of the first
    prompt of a call with several, which come one after another: where that was let in, so are the others.
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
    client: str = ""
    follows: str | None = None


class Cancel(FrontendMessage, frozen=True):
    """End a request; a no-op when it has ended. It is answered with `Failed` (aborted).

    With `stopped`, the front has found a stop string: the request is complete, and the answer is `Finished`.
    """

    rid: str
    stopped: bool = False


class FlushCache(FrontendMessage, frozen=True):
    """Forget all cached prefixes that no request uses."""


class Stop(FrontendMessage, frozen=True):
    """Refuse new work, finish or fail what runs within `drain_s`, then exit."""

    drain_s: float


class ModelInfo(FrontendMessage, frozen=True):
    """What the front needs to know of the loaded model to validate requests."""

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
    """One rank: which layers and KV heads it holds (half-open), and over what it can be written to (decode)."""

    rank: int
    device: str
    layers: tuple[int, int]
    kv_heads: tuple[int, int]
    transports: tuple[str, ...]


class Ready(FrontendMessage, frozen=True):
    """The leader serves. `max_total_tokens` is the longest prompt + output that fits the KV pool."""

    model: ModelInfo
    instance: str
    page_size: int
    num_pages: int
    max_total_tokens: int
    ranks: tuple[RankInfo, ...] = ()
    chosen: dict[str, int] = {}
    """Settings that were left open, as they were chosen."""


class StartupFailed(FrontendMessage, frozen=True):
    """The leader cannot start and is about to exit with code 2."""

    message: str


class Tokens(FrontendMessage, frozen=True):
    """New output tokens of one request, in order, with their log-probabilities where the request wants them."""

    rid: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Prefilled(FrontendMessage, frozen=True):
    """The prompt has been computed; comes before the first Tokens.

    So much of it was cached. Its log-probabilities, from `LogprobParams.start` on, are there if the request wants them.
    """

    rid: str
    cached_tokens: int
    input_logprobs: tuple[TokenLogprob, ...] = ()


class FinishReason(msgspec.Struct, frozen=True):
    """`stop` names the token that ended it (`matched`; the front knows a stop string), `length` the limit reached."""

    type: Literal["stop", "length"]
    matched: int | None = None
    length: int | None = None


class Finished(FrontendMessage, frozen=True):
    """Terminal: the request is complete. `timeline` maps stage names to seconds, in order."""

    rid: str
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timeline: dict[str, float]


class Failed(FrontendMessage, frozen=True):
    """Terminal: the request ended without (all of) its result; `status` is the HTTP status, `code` its error's code."""

    rid: str
    status: int
    code: str
    message: str
    retry_after_s: float | None = None


class PeerStatus(msgspec.Struct, frozen=True):
    """One peer server as this leader sees it."""

    endpoint: str
    state: Literal["connecting", "paired", "refused", "lost"]
    instance: str | None = None
    detail: str | None = None
    round_trip_ms: float | None = None
    transports: dict[str, str] = {}
    """How KV of each pool goes there (prefill)."""
    unusable_transports: dict[str, str] = {}
    """Those that should work between the two servers and do not, and why (prefill)."""


class Status(FrontendMessage, frozen=True):
    """The leader's gauges and counters by metric name, its peers, and how many requests are in each state.

    Sent a few times a second. `loop_age_s` is how long ago the engine loop last turned; `problems` make it unhealthy.
    `taken_at` is the Unix time of gauges, counters and states.
    """

    gauges: dict[str, float]
    counters: dict[str, float]
    peers: tuple[PeerStatus, ...]
    states: dict[str, int]
    taken_at: float
    loop_age_s: float
    problems: tuple[str, ...] = ()


ToLeader = Submit | Cancel | FlushCache | Stop
ToFrontend = Ready | StartupFailed | Tokens | Prefilled | Finished | Failed | Status
ToFrontendBatch = list[ToFrontend]
"""What one message on the socket holds, in order."""
