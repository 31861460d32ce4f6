"""The configuration of a server: one frozen model per role, with the same names in YAML and as flags.

`page_size` in a file is `--page-size` on the command line. Unknown names are refused, ranges are declared on the field,
and nothing changes after loading: memory/auto_settings.py and memory/sizing.py resolve `auto` at start and log it.
"""

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from .allowed_hosts import PRIVATE_NETWORKS, AllowedHosts
from .setting_types import (
    CpuKernelsSetting,
    DispatchSetting,
    DtypeSetting,
    Endpoint,
    Endpoints,
    HostEntries,
    IndexDtypeSetting,
    KvDtypeSetting,
    KvStoreUrl,
    LoadFormat,
    LocalPrefillSetting,
    Origins,
    Port,
    ReasoningParserName,
    StagingSetting,
    ToolParserName,
    TransportSetting,
)

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


def can_receive_kv(host: str) -> bool:
    """Whether peers can send KV to `host`: Mooncake accepts one IPv4 address or a name."""
    return ":" not in host and host not in ("", "*", "0.0.0.0")


class ServerConfig(BaseModel):
    """Settings of both prefill and decode servers."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=False, allow_inf_nan=False)

    model: str = Field(
        "smollm2",
        description="'smollm2' (embedded), a Hugging Face model directory, a .gguf file, or a model of the Hugging "
        "Face Hub: ORG/NAME or ORG/NAME:FILE.gguf",
    )
    revision: str | None = Field(
        None, min_length=1, description="branch, tag or commit of a model of the Hugging Face Hub; default: main"
    )
    served_model_name: str | None = Field(None, description="name in /v1/models; default: the model's own")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$", description="auto, cpu, cuda or cuda:N")
    dtype: DtypeSetting = Field(
        "auto",
        description="type of weights and KV; auto is float32 on CPU, where weights of GGUF files stay quantized, and "
        "the checkpoint's 16-bit type on CUDA (bfloat16 if it has none)",
    )
    kv_dtype: KvDtypeSetting = Field(
        "auto",
        description="type of KV: auto is that of the weights, fp8_e4m3 takes about half the memory of 16 bits",
    )
    index_dtype: IndexDtypeSetting = Field(
        "auto",
        description="type of the indexer keys of sparse-attention models: fp8_e4m3 with a scale per key (132 bytes "
        "instead of 256), or the model's; auto is fp8_e4m3 for 16-bit models on GPUs of capability 8.9 and above",
    )
    load_format: LoadFormat = Field(
        "auto",
        description="weights: auto reads the model's files; dummy uses random ones, for benchmarks of a geometry: "
        "config.json and a tokenizer are then enough",
    )
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads for the model; default: all, within the CPU quota"
    )
    cuda_graphs: bool = Field(
        True,
        description="run steps as CUDA graphs: decode batches, and chunks of up to 2048 tokens; with tp, if ranks "
        "communicate over NCCL or CUDA IPC memory",
    )
    cpu_kernels: CpuKernelsSetting = Field(
        "auto", description="float32 on the CPU: kernels compiled by Numba, or plain torch; auto is Numba if installed"
    )

    tp: int = Field(1, ge=1, le=64, description="tensor-parallel ranks: each holds a part of every layer")
    pp: int = Field(1, ge=1, le=64, description="pipeline stages: each holds some of the layers")
    expert_parallel: bool = Field(
        False, description="mixture-of-experts models: tensor-parallel ranks hold whole experts, not a part of each"
    )
    dp_attention: bool = Field(
        False,
        description="mixture-of-experts models: each of the tp ranks computes attention of its own requests and holds "
        "only their KV; experts are divided as with expert_parallel; sizes of pools and batches are per rank",
    )
    nnodes: int = Field(1, ge=1, le=64, description="number of machines for the tp x pp ranks")
    node_rank: int = Field(
        0, ge=0, le=63, description="number of this machine; machine 0 runs the HTTP frontend and the leader"
    )
    dist_init_addr: Endpoint | None = Field(
        None,
        description="rendezvous of the ranks: HOST:PORT of machine 0, which also uses PORT + 1; required if nnodes > 1",
    )

    host: str = Field("127.0.0.1", description="address that the HTTP and control ports bind to")
    advertise_host: str | None = Field(
        None,
        description="address of this machine for peers; auto: that of its host name; default: host",
    )
    api_key: SecretStr | None = Field(None, min_length=1, description="bearer token that HTTP clients must send")
    allow_role_switch: bool = Field(
        False,
        description="without api_key, let clients on this machine change the role (POST /role); a proxy here may pass "
        "requests of others",
    )
    ssl_certfile: str | None = Field(
        None, min_length=1, description="PEM file of the certificate chain; with ssl_keyfile, the HTTP port speaks TLS"
    )
    ssl_keyfile: str | None = Field(None, min_length=1, description="PEM file of the certificate's private key")
    ssl_keyfile_password: SecretStr | None = Field(None, description="password of an encrypted ssl_keyfile")
    cors_origin: Origins = Field(
        (),
        description="origins of web pages that may call this server from a browser (CORS), such as "
        "https://app.example.com, or * for all; default: none",
    )
    cluster_key: SecretStr | None = Field(
        None,
        min_length=16,
        description="shared secret of all servers (CURVE); required if the control port is not on loopback",
    )

    page_size: int = Field(16, ge=1, le=1024, description="tokens per KV page; prefill and decode may differ")
    kv_tokens: int | None = Field(None, ge=1, description="size of the KV pool in tokens")
    kv_memory_gib: float | None = Field(None, gt=0, description="size of the KV pool in GiB, instead of kv_tokens")
    kv_memory_fraction: float | None = Field(
        None,
        gt=0,
        le=0.95,
        description="share of free memory for the KV pool, without kv_tokens and kv_memory_gib; default: 0.25 on a "
        "CPU; on a GPU 0.35 (prefill) and 0.9 (decode; 0.5 if a prefill server may still start on the same GPU)",
    )

    prefix_cache: bool = Field(True, description="keep the KV of finished requests for later ones with the same prefix")
    kv_store: KvStoreUrl | None = Field(
        None,
        description="KV store that servers share: mooncake://HOST:PORT of a mooncake_master, or etcd://HOST:PORT[,...] "
        "of several masters; for 'pdserve up' also a size, such as 4GiB, with which it starts one; servers write "
        "cached pages to it, and load prefixes of the prompts that they compute",
    )
    kv_store_timeout_ms: float = Field(
        1000.0, gt=0, le=600_000, description="longest time that a prompt waits for KV of the store"
    )
    kv_store_lookup_timeout_ms: float = Field(
        50.0,
        gt=0,
        le=600_000,
        description="longest time that a prompt waits for the lookup of its prefix in the store",
    )
    max_queued_requests: int = Field(
        256,
        ge=1,
        le=1_000_000,
        description="maximum queued prompts, also those that wait for a grammar, and on decode requests that wait for "
        "a place in the batch or were retracted; more get 429; a call with several prompts is accepted or refused "
        "whole",
    )
    max_prompt_tokens: int | None = Field(None, ge=1, description="maximum tokens of a prompt; default: context length")
    max_body_bytes: int = Field(4 << 20, ge=1024, le=1 << 30, description="maximum size of an HTTP body")
    max_connections: int = Field(
        8192,
        ge=16,
        le=65536,
        description="maximum connections to the HTTP port; for a further one, an idle one is closed",
    )
    max_arriving_bytes: int = Field(
        256 << 20,
        ge=1024,
        le=1 << 36,
        description="maximum bytes of all HTTP bodies that have not arrived whole; beyond it, the client with most of "
        "them loses its oldest one, with 429",
    )
    max_parsing_bytes: int = Field(
        64 << 20,
        ge=1024,
        le=1 << 36,
        description="maximum bytes of all HTTP bodies that are being parsed; more get 429",
    )
    max_batch_items: int = Field(256, ge=1, le=65536, description="maximum prompts in one HTTP request")
    tool_parser: ToolParserName = Field(
        "auto",
        description="format in which the model calls tools; auto is that of its chat template, none refuses tools",
    )
    reasoning_parser: ReasoningParserName = Field(
        "auto",
        description="style of the model's reasoning, which chats return apart from the content; auto is that of its "
        "chat template, none leaves it in the content",
    )

    transport: TransportSetting = Field(
        "auto",
        description="transport of KV; auto is rdma between HCAs, else nvlink (CUDA IPC) between GPUs of one machine, "
        "else tcp",
    )
    ib_device: str | None = Field(
        None,
        min_length=1,
        description="HCA for rdma: mlx5_0, one per local GPU as mlx5_0,mlx5_1, or a map as 0=mlx5_0,1=mlx5_2 or JSON; "
        "default: all active ones",
    )
    ib_gid_index: int | None = Field(
        None, ge=0, le=255, description="entry of the HCA's GID table (RoCE); default: Mooncake's choice"
    )
    staging: StagingSetting = Field(
        "auto",
        description="send KV in few large writes, through a staging ring in decode's memory: auto if prefill and "
        "decode divide KV heads differently, on for all KV of dense models, off never; off on one side is off for both",
    )
    verify_kv: bool = Field(False, description="checksum every chunk of KV on both sides")
    heartbeat_interval_s: float = Field(0.4, gt=0, le=60, description="interval of heartbeats to peers")
    peer_timeout_s: float = Field(1.8, gt=0, le=600, description="a peer without heartbeats for this long is lost")
    slo_ttft_ms: float = Field(
        500.0,
        ge=1,
        le=3_600_000,
        description="limit on the time to the first token; prompts are computed in the order of their deadlines, "
        "and short ones have earlier ones",
    )
    shutdown_timeout_s: float = Field(10.0, ge=0, le=600, description="drain time of running requests after SIGTERM")
    stall_timeout_s: float = Field(
        120.0,
        gt=0,
        description="/health returns 503 if a step or the engine loop takes this long; stuck threads are found within "
        "5 s",
    )
    kv_events_port: Port | None = Field(
        None,
        le=65534,
        description="publish what the prefix cache stores and removes, for KV-aware routers (ZMQ, in the format of "
        "vLLM): a PUB socket here, replays at the next port; default: off",
    )
    kv_events_topic: str = Field("", description="first frame of each KV event message")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is logged")
    log_requests: bool = Field(
        False, description="log one line per finished or refused request: token counts and times, never text"
    )
    log_stats_interval_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="log a line of rates, requests and pools at this interval while there is work; 0 is never",
    )
    log_format: Literal["text", "json"] = Field("text", description="format of log lines; json has one object per line")
    otlp_endpoint: str | None = Field(
        None,
        pattern="^https?://",
        description="URL of an OpenTelemetry collector (OTLP/HTTP) for traces; default: OTEL_EXPORTER_OTLP_ENDPOINT",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "ServerConfig":
        if self.world_size % self.nnodes:
            raise ValueError(f"nnodes ({self.nnodes}) must divide tp x pp ({self.tp} x {self.pp})")
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank ({self.node_rank}) must be below nnodes ({self.nnodes})")
        if self.nnodes > 1 and self.dist_init_addr is None:
            raise ValueError("nnodes > 1 needs dist_init_addr: HOST:PORT of machine 0, the same on all machines")
        if self.nnodes > 1 and self.cluster_key is None:
            raise ValueError("nnodes > 1 needs a cluster_key: the leader accepts ranks of other machines only with it")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            given, missing = ("ssl_certfile", "ssl_keyfile")[:: 1 if self.ssl_keyfile is None else -1]
            raise ValueError(f"{given} needs {missing}: TLS takes a certificate and its private key")
        # with HiSparse, kv_tokens sizes host memory and kv_memory_gib device memory
        in_host_memory = isinstance(self, DecodeConfig) and self.enable_hisparse
        if self.kv_tokens is not None and self.kv_memory_gib is not None and not in_host_memory:
            raise ValueError("kv_tokens and kv_memory_gib both size the KV pool: give one of them")
        if self.kv_store is not None and not self.prefix_cache:
            raise ValueError("kv_store needs prefix_cache: only pages of the prefix cache are written to the store")
        if self.peer_timeout_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"peer_timeout_s ({self.peer_timeout_s}) must be at least twice heartbeat_interval_s "
                f"({self.heartbeat_interval_s})"
            )
        return self

    @property
    def kv_events_ports(self) -> tuple[int, ...]:
        """The ports of KV events and of their replay; none if they are off."""
        return () if self.kv_events_port is None else (self.kv_events_port, self.kv_events_port + 1)

    def _check_kv_events_port(self, **others: int) -> None:
        for name, port in others.items():
            if port in self.kv_events_ports:
                first = self.kv_events_port
                raise ValueError(
                    f"kv_events_port {first} and the port after it are for KV events, but {name} is {port}"
                )

    @property
    def world_size(self) -> int:
        return self.tp * self.pp

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks of attention: each has requests of its own."""
        return self.tp if self.dp_attention else 1

    @property
    def whole_experts(self) -> bool:
        """Whether ranks hold whole experts."""
        return self.expert_parallel or self.dp_size > 1

    @property
    def local_ranks(self) -> range:
        """The ranks of this machine."""
        share = self.world_size // self.nnodes
        return range(self.node_rank * share, (self.node_rank + 1) * share)

    @property
    def ranks_share_gpu(self) -> bool:
        """Whether several ranks of this machine are on one named GPU (`cuda:0`; with `cuda` each has its own). They
        take equal shares of its memory and communicate over CUDA IPC memory: NCCL needs a GPU per rank.
        """
        return self.device.startswith("cuda:") and len(self.local_ranks) > 1

    @property
    def http_scheme(self) -> Literal["http", "https"]:
        return "http" if self.ssl_certfile is None else "https"

    @property
    def url_host(self) -> str:
        """`host` as URLs have it: an IPv6 address in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def public_host(self) -> str:
        """The address that peers use."""
        return self.advertise_host or self.host


class PrefillConfig(ServerConfig):
    """`pdserve prefill`."""

    role: Literal["prefill"] = "prefill"
    port: Port = Field(8100, description="HTTP port")
    bootstrap_port: Port = Field(8998, description="control port (ZMQ) that decode servers connect to")
    chunk_size: int | None = Field(
        None,
        ge=1,
        le=1 << 20,
        description="maximum prompt tokens per step; default: 512 on a CPU, 1024 to 8192 on a GPU, by model",
    )
    send_window: int = Field(16, ge=1, le=512, description="Mooncake writes in flight from one rank to one decode rank")

    @model_validator(mode="after")
    def _consistent_prefill(self) -> "PrefillConfig":
        if self.host not in LOOPBACK_HOSTS and self.cluster_key is None:
            raise ValueError(
                f"host {self.host} exposes the control port: set cluster_key (or PDSERVE_CLUSTER_KEY) to a secret of "
                "at least 16 characters that all servers share"
            )
        if self.port == self.bootstrap_port:
            raise ValueError(f"HTTP port and bootstrap_port of prefill are both {self.port}: choose different ports")
        self._check_kv_events_port(port=self.port, bootstrap_port=self.bootstrap_port)
        if self.chunk_size is not None and self.chunk_size % self.page_size:
            raise ValueError(f"chunk_size ({self.chunk_size}) must be a multiple of page_size ({self.page_size})")
        return self


class DecodeConfig(ServerConfig):
    """`pdserve decode`."""

    role: Literal["decode"] = "decode"
    port: Port = Field(8200, description="HTTP port")
    prefill: Endpoints = Field(
        (),
        description="control ports of prefill servers: HOST:PORT[,HOST:PORT...]; a name stands for all its addresses",
    )
    bootstrap_allow: HostEntries | None = Field(
        None,
        description="hosts that a request may name as bootstrap_host, besides those of prefill and loopback: names, "
        "*.DOMAIN, addresses, networks as 10.0.0.0/8, or * for all; default: private networks when api_key is set",
    )
    max_running_requests: int | None = Field(
        None, ge=1, le=4096, description="maximum requests in one decode batch; default: 32 on a CPU, 256 on a GPU"
    )
    local_prefill: LocalPrefillSetting = Field(
        "auto",
        description="compute prompts on this server: never, always, or auto: if a prefill server would be late, if "
        "there is none or it uses the same GPU or CPU cores, and few tokens that hardly lengthen a step",
    )
    dispatch: DispatchSetting = Field(
        "prefix",
        description="choice of the prefill server: prefix, by the cached prefix of the prompt and the queues, or load, "
        "by the queues alone",
    )
    max_step_tokens: int | None = Field(
        None,
        ge=1,
        le=1 << 20,
        description="maximum tokens per step, of prompts and running requests together; default: 256 on a CPU, "
        "6144 on a GPU",
    )
    slo_itl_ms: float | None = Field(
        None,
        ge=0,
        le=3_600_000,
        description="limit on the predicted inter-token latency while this server computes prompts, which get at "
        "least 30 % of the time; 0 is no limit; default: 50 (500 on a CPU), or 2.5 times the time of a decode step if "
        "that is longer",
    )
    max_new_tokens_limit: int | None = Field(None, ge=1, description="largest max_new_tokens; default: context length")
    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="temperature, top_p, top_k, min_p and repetition_penalty that a request leaves out: from "
        "the model's generation_config.json, or OpenAI's defaults",
    )
    constrained_json_whitespace_pattern: str | None = Field(
        None,
        description="regular expression of the white space that may stand between two JSON tokens of an output with a "
        "grammar, such as [\\n\\t ]*; default: nothing or a blank",
    )
    constrained_json_disable_any_whitespace: bool = Field(
        False, description="no white space between the JSON tokens of an output with a grammar"
    )
    enable_hisparse: bool = Field(
        False,
        description="keep KV of sparse-attention models in host memory, and a small hot buffer per request on the GPU",
    )
    hot_rows: int | None = Field(
        None, ge=1, le=32767, description="rows of a request's hot buffer; default: 1.5 x the model's index_topk"
    )
    host_memory_gib: float | None = Field(None, gt=0, description="pinned host memory for KV (HiSparse), in GiB")
    host_memory_fraction: float = Field(
        0.5, gt=0, le=0.95, description="share of free host memory for KV (HiSparse) if host_memory_gib is not given"
    )
    staging_ring_mib: float | None = Field(
        None,
        gt=0,
        description="staging ring of each rank, in MiB; default: twice the KV of 4096 tokens, at most 128 MiB",
    )
    growth_tokens: int = Field(
        128, ge=1, description="output tokens for which KV is reserved at admission; longer requests may be retracted"
    )
    retract_memory_gib: float = Field(
        4.0,
        ge=0,
        description="host memory for the KV of retracted requests; page-locked up to the size of the KV pool",
    )
    queue_timeout_s: float = Field(
        60.0, gt=0, description="longest wait in queues before prefill starts: for KV memory, or behind other prompts"
    )
    prefill_wait_s: float = Field(
        3.0, gt=0, description="longest wait for a paired prefill server, at arrival and after one is lost"
    )
    prefill_timeout_s: float = Field(
        120.0, gt=0, description="longest time from dispatch to prefill until the last KV byte"
    )
    request_timeout_s: float = Field(600.0, gt=0, description="longest time from arrival to the last token")
    quarantine_s: float = Field(
        6.0,
        ge=0,
        description="quarantine of the pages of a failed transfer; longer than Mooncake's progress timeout (5 s)",
    )

    @model_validator(mode="after")
    def _reachable(self) -> "DecodeConfig":
        self._check_kv_events_port(port=self.port)
        if self.constrained_json_disable_any_whitespace and self.constrained_json_whitespace_pattern is not None:
            raise ValueError(
                "constrained_json_disable_any_whitespace allows no white space, and "
                "constrained_json_whitespace_pattern allows some: give one of them"
            )
        try:
            re.compile(self.constrained_json_whitespace_pattern or "")
        except re.error as error:
            raise ValueError(f"constrained_json_whitespace_pattern is not a regular expression: {error}") from error
        if not can_receive_kv(self.public_host):
            field = "host" if self.advertise_host is None else "advertise_host"
            raise ValueError(
                f"{field} {self.public_host!r} is not where peers can send KV: set advertise_host to the IPv4 address "
                "or the name of this machine"
            )
        return self

    @property
    def json_whitespace(self) -> str | None:
        """White space in JSON, for `Grammar.json_whitespace`."""
        return "" if self.constrained_json_disable_any_whitespace else self.constrained_json_whitespace_pattern

    @property
    def public_host(self) -> str:
        """Loopback if no peer sends KV: Mooncake's ports have no authentication."""
        receives = self.local_prefill != "always" or bool(self.prefill) or self.kv_store is not None
        return super().public_host if receives or self.advertise_host is not None else LOOPBACK_HOSTS[0]

    @property
    def allowed_bootstrap_hosts(self) -> AllowedHosts:
        """Hosts that requests may name. Without an API key, only configured ones: requests may come from anyone."""
        known = (*LOOPBACK_HOSTS, *(endpoint.rpartition(":")[0] for endpoint in self.prefill))
        private = PRIVATE_NETWORKS if self.api_key is not None else ()
        return AllowedHosts.of((*known, *(private if self.bootstrap_allow is None else self.bootstrap_allow)))


AnyServerConfig = PrefillConfig | DecodeConfig
