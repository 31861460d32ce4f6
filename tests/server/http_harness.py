"""The real application over a real socket, with a `ScriptedLeader` on the other end of the real leader socket."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import tokenizers
import uvicorn
from starlette.types import ASGIApp
from tokenizers import decoders, models, pre_tokenizers

from pdserve.common.errors import RoleConflictError
from pdserve.common.sampling import NEUTRAL_SAMPLING, SamplingParams
from pdserve.common.stuck import Watch
from pdserve.configs.load import Role
from pdserve.configs.schema import AnyServerConfig, DecodeConfig
from pdserve.models.loading.catalog import locate_model
from pdserve.scheduler.messages.frontend import Status
from pdserve.server.api.app import Routes, create_app
from pdserve.server.api.role import RoleReport
from pdserve.server.api.service.service import Service
from pdserve.server.connections.http_protocol import PatientHttpProtocol
from pdserve.server.engine.leader_client import LeaderClient
from pdserve.server.launch.frontend import HttpServer
from pdserve.server.observability.metrics import Metrics
from pdserve.server.text.tokenizer import Tokenizer, load_tokenizer
from tests.server.scripted_leader import CONTEXT_LENGTH, EOS, VOCAB_SIZE, ScriptedLeader, make_ready, make_status

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_byte_model(directory: Path) -> Path:
    """A model directory whose token ids are the UTF-8 bytes of the text, plus <eos> (256) and <bos> (257)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    vocab = {chr(byte): byte for byte in kept} | {chr(256 + n): byte for n, byte in enumerate(moved)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<bos>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {"eos_token": "<eos>", "bos_token": "<bos>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": EOS,
        "bos_token_id": 257,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").touch()
    return directory


def load_byte_tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(locate_model(str(write_byte_model(directory))))


@dataclass(frozen=True)
class RunningServer:
    http: httpx.AsyncClient
    leader: ScriptedLeader
    client: LeaderClient
    port: int
    server: HttpServer

    async def report(self, status: Status | None = None) -> None:
        """Send a Status. Returns when the frontend has received it and all earlier messages."""
        before = self.client.status
        await self.leader.send(status or make_status())
        async with asyncio.timeout(10):
            while self.client.status is before:
                await asyncio.sleep(0.001)


class FixedRole:
    """`/role` of a server whose role does not change."""

    def __init__(self, role: Role) -> None:
        self._role: Role = role

    def report(self) -> RoleReport:
        return {"role": self._role, "since": 0.0, "state": "ready", "fixed": "a test", "switch": None}

    def former(self) -> None:
        return None

    async def request(self, role: Role, settings: Mapping[str, object], *, drain: bool) -> None:
        raise RoleConflictError(f"a test: {role}, {settings}, {drain}")


@asynccontextmanager
async def running_server(
    tokenizer: Tokenizer,
    config: AnyServerConfig | None = None,
    *,
    ready: bool = True,
    default_sampling: SamplingParams = NEUTRAL_SAMPLING,
) -> AsyncIterator[RunningServer]:
    """A server without a leader process. When the block ends, open requests fail, their handlers must end, and
    LeaderClient.run() must not have failed.
    """
    config = config or DecodeConfig(bootstrap_allow=("p1",))
    metrics = Metrics()
    client = LeaderClient(metrics, config, watch=Watch(lambda: 0.0))  # the scripted leader may be silent
    metrics.set_role(config.role)
    metrics.watch_leader(lambda: client)
    roles = FixedRole(config.role)
    service = Service(config, tokenizer, client, default_sampling, roles.former)
    app = create_app(Routes(service, metrics, roles))
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio then sets TCP_NODELAY
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port: int = listener.getsockname()[1]
    server = await start_http(app, listener)
    receiving = asyncio.create_task(client.run())
    leader = ScriptedLeader(client.address)
    try:
        if ready:
            await introduce(leader, client)
        base_url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=base_url, timeout=10, verify=False, trust_env=False) as http:
            yield RunningServer(http, leader, client, port, server)
    finally:
        client.fail_all("end of the test")
        await stop_http(server)
        receiving.cancel()
        (ended,) = await asyncio.gather(receiving, return_exceptions=True)
        leader.close()
        client.close()
        assert isinstance(ended, asyncio.CancelledError), f"LeaderClient.run() has failed: {ended!r}"


async def introduce(leader: ScriptedLeader, client: LeaderClient) -> None:
    """Send Ready and a Status; returns when the frontend has received both."""
    await leader.send(make_ready(), make_status())
    async with asyncio.timeout(10):
        await client.wait_ready()
        while client.status is None:
            await asyncio.sleep(0.001)


async def start_http(app: ASGIApp, listener: socket.socket) -> HttpServer:
    """uvicorn without its main loop, which would add 0.2 s to every test."""
    config = uvicorn.Config(app, http=PatientHttpProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    server = HttpServer(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    return server


async def stop_http(server: HttpServer) -> None:
    for listening in server.servers:
        listening.close()
    for connection in list(server.server_state.connections):
        connection.shutdown()
    async with asyncio.timeout(10):
        while server.server_state.tasks:
            await asyncio.sleep(0.005)


def sse_events(text: str) -> list[object]:
    """The decoded `data:` events of a stream, [DONE] as a string; fails on anything that is not an event."""
    assert text.endswith("\n\n"), "the stream must end with an event's empty line"
    events: list[object] = []
    for block in text[:-2].split("\n\n"):
        assert block.startswith("data: "), f"not an event: {block!r}"
        payload = block.removeprefix("data: ")
        events.append(payload if payload == "[DONE]" else json.loads(payload))
    return events
