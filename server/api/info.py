"""Builds the replies of the information routes: health, model, configuration, load and peers."""

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, NotRequired

import msgspec
from pydantic import Field, PlainValidator, SecretStr, WithJsonSchema
from typing_extensions import TypedDict

from ...configs.load import public_dict
from ...configs.schema import AnyServerConfig, PrefillConfig
from ...scheduler.messages.frontend import DpRankStatus, PeerStatus
from ...scheduler.messages.lifecycle import State
from ...transfer.control.events import describe_absence
from ..engine.leader_client import LeaderClient
from ..observability.leader_metrics import WAITING_STATES
from ..observability.recent_requests import RecentRequest
from ..observability.versions import package_version
from .service.service import Service

HELD_STATES = (State.ARRIVED.value, State.OPENING.value, State.READY.value)
"""Requests in these states have their KV, and wait for a hot buffer or a place in the batch."""

Peer = Annotated[
    PeerStatus,
    PlainValidator(lambda value: msgspec.convert(value, PeerStatus)),
    WithJsonSchema(msgspec.json.schema(PeerStatus)["$defs"]["PeerStatus"]),
]


class KvStoreHealth(TypedDict):
    """The state of the KV store. Without the store this server is still healthy: it computes all prompts."""

    url: str
    state: Literal["ok", "unavailable"]
    problem: str | None


class Health(TypedDict):
    """The health of this server. Peers are listed, but a lost peer does not make this server unhealthy."""

    status: Literal["ok", "unavailable"]
    state: str
    reasons: Annotated[list[str], Field(description="Why this server is unavailable.")]
    warnings: Annotated[list[str], Field(description="On decode: why no prefill server is paired.")]
    role: Literal["prefill", "decode"]
    peers: list[Peer]
    kv_store: NotRequired[Annotated[KvStoreHealth, Field(description="With --kv-store.")]]
    generated: NotRequired[Annotated[bool, Field(description="/health_generate: whether a token was generated.")]]


class ModelInfo(TypedDict):
    model_path: str
    tokenizer_path: str
    is_generation: bool
    served_model_name: str
    architecture: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    fingerprint: str


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Load(TypedDict):
    """The load of one data-parallel rank, in SGLang's shape. Without data-parallel attention there is one entry."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: Annotated[int, Field(description="In the KV pool and, on prefill, waiting to be computed.")]


class Version(TypedDict):
    version: str


class Pool(TypedDict):
    """The size of the KV pool; with dp_attention, of the pool of each data-parallel rank."""

    page_size: int
    num_pages: int
    tokens: int
    max_total_tokens: int


class DpRank(TypedDict):
    """One data-parallel rank: its requests and its pools."""

    dp_rank: int
    requests: Annotated[int, Field(description="Live requests.")]
    kv_tokens: Annotated[int, Field(description="Tokens of the pages that requests hold.")]
    waiting: Annotated[
        int, Field(description="Requests for which no rank has pages: the first rank that has some gets them (decode).")
    ]
    states: Mapping[str, int]
    gauges: Mapping[str, float]


class ServerReport(TypedDict):
    version: str
    status: str
    served_model_name: str
    model_path: str
    disaggregation_mode: Literal["prefill", "decode"]
    tp_size: int
    pp_size: int
    dp_size: int
    config: Annotated[dict[str, object], Field(description="Without secrets.")]
    peers: list[Peer]
    taken_at: Annotated[float | None, Field(description="Unix time of states, gauges and counters.")]
    states: Annotated[Mapping[str, int], Field(description="Requests by state.")]
    gauges: Mapping[str, float]
    counters: Mapping[str, float]
    frontend_lag_s: Annotated[float, Field(description="Longest lag of the HTTP event loop in the last minute.")]
    recent: Annotated[list[RecentRequest], Field(description="The last requests that have ended, on decode.")]
    dp_ranks: NotRequired[Annotated[list[DpRank], Field(description="With dp_attention; gauges above are totals.")]]
    disaggregation_bootstrap_port: NotRequired[int]
    instance: NotRequired[str]
    ranks: NotRequired[list[object]]
    max_total_num_tokens: NotRequired[int]
    pool: NotRequired[Pool]


class ServerInfo:
    """Builds the replies from the configuration and the leader's latest messages."""

    def __init__(self, service: Service, lag_s: Callable[[], float]) -> None:
        self._service = service
        self._lag_s = lag_s
        self._started_at = time.time()

    @property
    def _config(self) -> AnyServerConfig:
        return self._service.config

    @property
    def _leader(self) -> LeaderClient:
        return self._service.leader

    def health(self) -> Health:
        reasons = self._leader.problems()
        health: Health = {
            "status": "ok" if not reasons else "unavailable",
            "state": self._leader.state,
            "reasons": reasons,
            "warnings": self._warnings(),
            "role": self._config.role,
            "peers": self._peers(),
        }
        if self._config.kv_store is not None:
            status = self._leader.status
            problem = status.kv_store_problem if status is not None else "not connected yet"
            state: Literal["ok", "unavailable"] = "ok" if problem is None else "unavailable"
            health["kv_store"] = {"url": self._config.kv_store, "state": state, "problem": problem}
        return health

    def _warnings(self) -> list[str]:
        """Returns why no prefill server is paired. A decode server is healthy then, but may be unable to generate."""
        peers, config = self._peers(), self._config
        if isinstance(config, PrefillConfig) or self._leader.status is None or any(p.state == "paired" for p in peers):
            return []
        if config.local_prefill == "always" or (config.local_prefill == "auto" and not peers):
            return []
        if not peers:
            return [
                "no prefill server is known: give --prefill, or name one in requests as routers do (bootstrap_host)"
            ]
        known = {peer.endpoint: peer.detail or peer.state for peer in peers}
        instead = "; this server computes prompts itself" if config.local_prefill == "auto" else ""
        return [f"no prefill server is paired: {describe_absence(known)}{instead}"]

    def model(self) -> ModelInfo:
        model = self._leader.check_available().model
        return {
            "model_path": model.path,
            "tokenizer_path": model.path,
            "is_generation": True,
            "served_model_name": self._service.model_name,
            "architecture": model.architecture,
            "context_length": model.context_length,
            "vocab_size": model.vocab_size,
            "eos_token_ids": model.eos_token_ids,
            "dtype": model.dtype,
            "device": model.device,
            "fingerprint": model.fingerprint,
        }

    def model_card(self) -> ModelCard:
        ready = self._leader.check_available()
        return {
            "id": self._service.model_name,
            "object": "model",
            "created": int(self._started_at),
            "owned_by": "sglang",  # tells routers to send bootstrap_room
            "root": ready.model.path,
            "max_model_len": min(ready.model.context_length, ready.max_total_tokens),
        }

    def load(self) -> list[Load]:
        ready = self._leader.check_available()
        return [
            {
                "dp_rank": rank["dp_rank"],
                "num_reqs": rank["requests"],
                "num_waiting_reqs": sum(rank["states"].get(state, 0) for state in (*WAITING_STATES, *HELD_STATES)),
                "num_tokens": rank["kv_tokens"] + int(rank["gauges"].get("waiting_tokens", 0)),
            }
            for rank in self._dp_ranks(ready.page_size)
        ]

    def _dp_ranks(self, page_size: int) -> list[DpRank]:
        status = self._leader.status
        if status is None:
            ranks: tuple[DpRankStatus, ...] = (DpRankStatus(0, {}, {}),)
        else:
            ranks = status.dp_ranks or (DpRankStatus(0, status.gauges, status.states),)
        return [
            {
                "dp_rank": rank.dp_rank,
                "requests": sum(rank.states.values()),
                "kv_tokens": int(rank.gauges.get("kv_pages_held", 0)) * page_size,
                "waiting": int(rank.gauges.get("waiting_for_pages", 0)),
                "states": rank.states,
                "gauges": rank.gauges,
            }
            for rank in ranks
        ]

    def server(self) -> ServerReport:
        """The reply of /server_info. Some fields have SGLang's names, because routers read them."""
        config, ready, status = self._config, self._leader.ready, self._leader.status
        info: ServerReport = {
            "version": package_version(),
            "status": self._leader.state,
            "served_model_name": self._service.model_name,
            "model_path": ready.model.path if ready else config.model,
            "disaggregation_mode": config.role,
            "tp_size": config.tp,
            "pp_size": config.pp,
            "dp_size": config.dp_size,
            "config": self._public_config(),
            "peers": self._peers(),
            "taken_at": status.taken_at if status else None,
            "states": status.states if status else {},
            "gauges": status.gauges if status else {},
            "counters": status.counters if status else {},
            "frontend_lag_s": self._lag_s(),
            "recent": self._leader.recent.list(),
        }
        if config.dp_size > 1 and ready is not None:
            info["dp_ranks"] = self._dp_ranks(ready.page_size)
        if isinstance(config, PrefillConfig):
            info["disaggregation_bootstrap_port"] = config.bootstrap_port
        if ready is not None:
            info["instance"] = ready.instance
            info["ranks"] = list(ready.ranks)
            info["max_total_num_tokens"] = ready.num_pages * ready.page_size
            info["pool"] = {
                "page_size": ready.page_size,
                "num_pages": ready.num_pages,
                "tokens": ready.num_pages * ready.page_size,
                "max_total_tokens": ready.max_total_tokens,
            }
        return info

    def _public_config(self) -> dict[str, object]:
        """The configuration with values that the leader chose. For a secret it says only that it is set."""
        public = public_dict(self._config)
        public.update({name: "set" for name, value in self._config if isinstance(value, SecretStr)})
        if self._leader.ready is not None:
            public.update(self._leader.ready.chosen)
        return public

    def _peers(self) -> list[PeerStatus]:
        return list(self._leader.status.peers if self._leader.status else ())
