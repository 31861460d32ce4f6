"""200 clients on each port of a pair that connect and send nothing, or ask and read nothing: they cost the servers
little memory, and the next client is served.
"""

import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq

from pdserve.transfer.protocol.messages import Heartbeat, InstanceId, Load
from pdserve.transfer.protocol.wire import Envelope, encode
from pdserve.transfer.protocol.zmtp import frame_head
from tests.checkpoints import VOCAB_SIZE
from tests.cluster.servers import HTTP, Cluster, Server, body, cluster
from tests.ports import free_ports
from tests.scheduler.engine.zmtp_clients import connect, replay_client, shaken, subscriber

CLIENTS = 200
GROWTH_MIB = 50
BATCHES = 1000
HEALTH_S = 0.5
REPLAY_S = 5.0
PROMPT_TOKENS = 256
ARRIVING_BYTES = 8 << 20
BODY_BYTES = 4 << 20
"""max_body_bytes. The 200 slow bodies have 600 MiB together."""
SLOW_BODIES_MIB = 3 * 8 + CLIENTS * 0.32
"""What they may cost: three times max_arriving_bytes, and for each connection what is read from it at once."""
RECEIVE_BYTES = 4096
"""Receive buffer of a client that reads nothing."""


class Pair:
    """A pair whose prefill server publishes KV events."""

    def __init__(self, started: Cluster, model: Path) -> None:
        self.events_port = free_ports(2)
        sizes = ("--kv-tokens", "16384", "--page-size", "16")
        self.prefill, self.decode = started.pair(
            model,
            (*sizes, "--kv-events-port", str(self.events_port)),
            (*sizes, "--max-arriving-bytes", str(ARRIVING_BYTES), "--prefill-wait-s", "60"),
        )

    @property
    def processes(self) -> dict[str, int]:
        """The processes that clients can reach, or that work for them."""
        found = {}
        for server in (self.prefill, self.decode):
            assert server.process is not None
            found[f"frontend of {server.role}"] = server.process.pid
            found[f"leader of {server.role}"] = server.leader_pid()
        return found

    def publish(self, batches: int) -> None:
        """Compute prompts until so many batches were published."""
        draw = random.Random(0)
        with ThreadPoolExecutor(4) as pool:
            while (missing := batches - len(self.replay())) > 0:
                prompts = [draw.choices(range(VOCAB_SIZE), k=PROMPT_TOKENS) for _ in range(min(missing, 100))]
                for _ in pool.map(lambda prompt: self.decode.generate(prompt, 1), prompts):
                    pass

    def replay(self) -> list[bytes]:
        """The batches that are kept."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(f"tcp://127.0.0.1:{self.events_port + 1}")
            dealer.send_multipart((b"", bytes(8)))
            batches: list[bytes] = []
            while True:
                assert dealer.poll(30_000)
                *_, payload = dealer.recv_multipart()
                if not payload:
                    return batches
                batches.append(payload)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Iterator[Pair]:
    with cluster(tmp_path_factory.mktemp("silent")) as started:
        pair = Pair(started, llama)
        pair.publish(BATCHES)
        yield pair
        pair.prefill.check_clean()
        pair.decode.check_clean()


def mib_of(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def asked(server: Server, request: bytes) -> socket.socket:
    """A client that has sent as many requests as a connection may have, and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    client.connect(("127.0.0.1", server.port))
    client.sendall(request * 16)
    return client


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def generate() -> bytes:
    text = json.dumps(body([5, 6, 7], 64, stream=True)).encode()
    return b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(text) + text


def control_client(server: Server) -> socket.socket:
    """One that is not known, and sends as many messages that are answered as it may send bytes."""
    client = shaken(server.bootstrap_port, "DEALER")
    heartbeat = encode(Heartbeat(InstanceId("decode-of-nobody"), 0.0, Load(), {}))
    frames = [Envelope(0, 0).pack(), *map(bytes, heartbeat)]
    message = b"".join(frame_head(len(frame), number < len(frames) - 1) + frame for number, frame in enumerate(frames))
    with suppress(OSError):  # closed while it sends
        client.sendall(message * ((900 << 10) // len(message)))
    return client


def slow_body(server: Server) -> socket.socket:
    """A client that sends most of a body."""
    client = connect(server.port)
    client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % BODY_BYTES)
    client.sendall(bytes(BODY_BYTES // 4 * 3))
    return client


KINDS: dict[str, Callable[[Pair], socket.socket]] = {
    "HTTP of decode, mute": lambda pair: connect(pair.decode.port),
    "HTTP of decode, asked": lambda pair: asked(pair.decode, get("/openapi.json")),
    "HTTP of decode, metrics": lambda pair: asked(pair.decode, get("/metrics")),
    "HTTP of decode, streams": lambda pair: asked(pair.decode, generate()),
    "HTTP of decode, slow bodies": lambda pair: slow_body(pair.decode),
    "HTTP of prefill, mute": lambda pair: connect(pair.prefill.port),
    "HTTP of prefill, asked": lambda pair: asked(pair.prefill, get("/openapi.json")),
    "control, mute": lambda pair: connect(pair.prefill.bootstrap_port),
    "control, asked": lambda pair: control_client(pair.prefill),
    "KV events, mute": lambda pair: connect(pair.events_port),
    "KV events, asked": lambda pair: subscriber(pair.events_port),
    "replay, mute": lambda pair: connect(pair.events_port + 1),
    "replay, asked": lambda pair: replay_client(pair.events_port + 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_silent_clients_cost_little_and_the_next_one_is_served(pair: Pair, kind: str) -> None:
    for server in (pair.decode, pair.prefill):
        HTTP.get(f"{server.url}/openapi.json", timeout=60)  # kept for all
    published = len(pair.replay())
    before = {name: mib_of(process) for name, process in pair.processes.items()}
    most = before.copy()

    def sample() -> None:
        for name, process in pair.processes.items():
            most[name] = max(most[name], mib_of(process))

    with ExitStack() as stack:
        for _ in range(CLIENTS):
            stack.callback(KINDS[kind](pair).close)
            sample()
        if kind.startswith("KV events"):
            pair.publish(published + 100)
        ends_at = time.monotonic() + 2
        while time.monotonic() < ends_at:
            sample()
            time.sleep(0.05)
        health_s = min(seconds(lambda: _health(pair)) for _ in range(3))
        began = time.monotonic()
        assert len(pair.replay()) >= BATCHES
        replay_s = time.monotonic() - began
        sample()
    growth = {name: most[name] - before[name] for name in before}
    shown = ", ".join(f"{name} {mib:.1f}" for name, mib in growth.items())
    print(f"{kind}: MiB {shown}; /health {health_s:.3f} s, replay {replay_s:.2f} s")
    assert max(growth.values()) < (SLOW_BODIES_MIB if "slow" in kind else GROWTH_MIB), growth
    assert health_s < HEALTH_S
    assert replay_s < REPLAY_S


def _health(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        assert HTTP.get(f"{server.url}/health", timeout=30).status_code == 200


def seconds(action: Callable[[], object]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began
