"""Servers are stopped, killed and cut off at random while clients send, abort, disconnect and time out.

Every request gets exactly one response in bounded time, and every 200 has the tokens of transformers. Afterwards all
pages are free, all peers are paired, and no thread is left over. The faults of a round follow from its seed; their
timing also depends on the machine.
"""

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.checkpoints import load_reference, make_checkpoint, make_dsa_checkpoint, reference_greedy
from tests.cluster.servers import HTTP, Cluster, Server, body, cluster, wait_until
from tests.transfer.control.tcp_proxy import TcpProxy

ROUNDS = int(os.environ.get("PDSERVE_CHAOS", "1"))
"""Number of rounds. Even seeds use a dense model, odd ones sparse attention with KV in host memory."""
FAULTS = 12
CLIENTS = 8
MOST_PAUSE_S = 0.5
"""Between two requests of a client: without pauses the clients only keep the cores busy."""
NEW_TOKENS = 24
LENGTHS = (1, 16, 33, 64, 100, 150, 230, 400)
ANSWERED_S = 60.0
"""Longer than every timeout of the servers below, with a margin for two busy cores."""
TIMEOUTS = {"--request-timeout-s": "30", "--queue-timeout-s": "12", "--prefill-timeout-s": "15"}
PREFILL = ("--kv-tokens", "4096", "--chunk-size", "32", "--max-queued-requests", "32")
DECODE = ("--page-size", "8", "--growth-tokens", "8", "--max-queued-requests", "32")
DENSE = (*DECODE, "--kv-tokens", "1600", "--staging-ring-mib", "0.05")
HISPARSE = (*DECODE, "--kv-tokens", "1600", "--enable-hisparse", "--hot-rows", "32", "--kv-memory-gib", "0.00125")
REFUSALS = {429, 503, 504}
"""Queue full, no prefill server, deadline."""


class ChaosServers(NamedTuple):
    """Two prefill servers, each behind a proxy. The second has two ranks and, with a dense model, stages its KV."""

    seed: int
    prefills: list[Server]
    proxies: list[TcpProxy]
    decode: Server
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(params=range(ROUNDS), ids=lambda seed: f"seed{seed}")
def chaos(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ChaosServers]:
    seed: int = request.param
    flags: tuple[str, ...]
    if seed % 2:
        model = make_dsa_checkpoint(tmp_path / "model", "glm_moe_dsa", index_topk=16, index_topk_pattern="FSSF")
        second, flags = ("--pp", "2"), HISPARSE
    else:
        model = make_checkpoint(tmp_path / "model", "qwen3", num_attention_heads=8, num_key_value_heads=4, head_dim=16)
        second, flags = ("--tp", "2"), DENSE
    with cluster(tmp_path) as servers, ExitStack() as stack:
        prefills = [servers.add("prefill", model, *PREFILL, *extra) for extra in ((), second)]
        proxies = [stack.enter_context(TcpProxy(server.bootstrap_port)) for server in prefills]
        decode = start_decode(servers, model, proxies, flags)
        draw = random.Random(seed)
        shared = draw.choices(range(256), k=max(LENGTHS))
        prompts = [(shared if draw.random() < 0.5 else draw.choices(range(256), k=n))[:n] for n in LENGTHS]
        reference = load_reference(model)
        expected = [reference_greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]
        decode.wait_ready(peers=2)
        yield ChaosServers(seed, prefills, proxies, decode, prompts, expected)


def start_decode(servers: Cluster, model: Path, proxies: list[TcpProxy], flags: tuple[str, ...]) -> Server:
    endpoints = ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies)
    timeouts = [word for setting in TIMEOUTS.items() for word in setting]
    return servers.add("decode", model, "--prefill", endpoints, *flags, *timeouts)


class Client:
    """Sends one request after another until `leaving` is set; records the outcomes and what is wrong with them."""

    def __init__(self, chaos: ChaosServers, number: int, leaving: threading.Event) -> None:
        self._chaos = chaos
        self._number = number
        self._leaving = leaving
        self._draw = random.Random(f"{chaos.seed}-{number}")
        self.outcomes: list[str] = []
        self.wrong: list[str] = []

    def run(self) -> "Client":
        while not self._leaving.is_set():
            started = time.monotonic()
            try:
                self.outcomes.append(self._send(f"{self._chaos.seed}-{self._number}-{len(self.outcomes)}"))
            except httpx.TransportError as error:
                self.wrong.append(f"no response: {error!r}")
            if time.monotonic() - started > ANSWERED_S:
                self.wrong.append(f"a response after {time.monotonic() - started:.1f} s")
            self._leaving.wait(self._draw.uniform(0, MOST_PAUSE_S))
        return self

    def _send(self, rid: str) -> str:
        draw = self._draw
        case, tokens = draw.randrange(len(LENGTHS)), draw.randint(1, NEW_TOKENS)
        expected = self._chaos.expected[case][:tokens]
        request = body(
            self._chaos.prompts[case], tokens, rid=rid, stream=draw.random() < 0.5, priority=draw.randint(-1, 1)
        )
        patience_s = draw.choice([0.005, 0.05, 0.3, 1.0])
        ending = draw.choice(["read", "read", "read", "leave", "deadline", "abort"])
        if ending == "deadline":
            request["timeout_s"] = patience_s
        if ending == "abort":
            threading.Timer(patience_s, self._abort, (rid,)).start()
        try:
            answer = HTTP.post(
                f"{self._chaos.decode.url}/generate",
                json=request,
                timeout=patience_s if ending == "leave" else 2 * ANSWERED_S,
            )
        except httpx.TimeoutException:
            if ending == "leave":
                return "left"
            raise
        if answer.status_code == 200:
            return (
                self._check_stream(rid, answer.text, expected) if request["stream"] else self._check(answer, expected)
            )
        if answer.status_code not in REFUSALS:
            self.wrong.append(f"{rid}: {answer.status_code} {answer.text}")
        return str(answer.status_code)

    def _check(self, answer: httpx.Response, expected: list[int]) -> str:
        result = answer.json()
        aborted = is_aborted(result)
        if result["output_ids"] != expected[: len(result["output_ids"]) if aborted else None]:
            self.wrong.append(f"{result} is not {expected}")
        return "aborted" if aborted else "200"

    def _check_stream(self, rid: str, text: str, expected: list[int]) -> str:
        """One event per step; the last one is complete or an error, then [DONE]."""
        events = re.findall(r"^data: (.*)$", text, re.MULTILINE)
        parts = [json.loads(event) for event in events[:-1]]
        if not parts or events[-1] != "[DONE]":
            self.wrong.append(f"{rid} is cut short: {events[-2:]}")
        elif any(part["output_ids"] != expected[: len(part["output_ids"])] for part in parts):
            self.wrong.append(f"{rid}: {parts[-1]} is not {expected}")
        elif "error" in parts[-1]:
            return str(parts[-1]["error"]["code"])
        elif is_aborted(parts[-1]):
            return "aborted"
        elif parts[-1]["output_ids"] != expected:
            self.wrong.append(f"{rid} ends too soon: {parts[-1]}")
        return "200"

    def _abort(self, rid: str) -> None:
        with suppress(httpx.TransportError):
            HTTP.post(f"{self._chaos.decode.url}/abort_request", json={"rid": rid}, timeout=ANSWERED_S)


def is_aborted(result: dict[str, Any]) -> bool:
    """Aborted by /abort_request: the response is the output so far."""
    return (result["meta_info"]["finish_reason"] or {}).get("type") == "abort"


def inject_fault(chaos: ChaosServers, draw: random.Random) -> None:
    """Inject one fault and end it. The second prefill server has only network faults: it exits if a rank stops."""
    number = draw.randrange(2)
    proxy = chaos.proxies[number]
    duration_s = draw.choice([0.1, 0.5, 1.0, 2.5])
    match draw.choice(["stop", "stop", "kill", "cut", "cut unnoticed", "half-close", "hold", "delay", "chop"]):
        case "stop":
            stopped = draw.choice([chaos.prefills[0], chaos.decode])
            stopped.freeze()
            time.sleep(duration_s)
            stopped.signal_all(signal.SIGCONT)
        case "kill":
            chaos.prefills[0].kill()
            time.sleep(duration_s)
            chaos.prefills[0].start().wait_ready()
        case "cut":
            proxy.cut()
        case "cut unnoticed":
            proxy.both_ends = False
            proxy.cut()
            time.sleep(duration_s)
            proxy.both_ends = True
            proxy.cut()
        case "half-close":
            proxy.half_close()
        case "hold":
            proxy.flows.clear()
            time.sleep(duration_s)
            proxy.flows.set()
        case "delay":
            proxy.delay_s = 0.1
            time.sleep(duration_s)
            proxy.delay_s = 0.0
        case "chop":
            proxy.piece_bytes = 7
            time.sleep(duration_s)
            proxy.piece_bytes = 65536
    time.sleep(draw.uniform(0.1, 0.7))


def thread_count(server: Server) -> int:
    found = re.search(r"Threads:\s+(\d+)", Path(f"/proc/{server.leader_pid()}/status").read_text())
    assert found is not None
    return int(found[1])


def check_tokens(chaos: ChaosServers) -> None:
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda prompt: chaos.decode.generate(prompt, NEW_TOKENS), chaos.prompts)) == chaos.expected


def test_servers_recover_from_random_faults(chaos: ChaosServers) -> None:
    check_tokens(chaos)
    unkilled = [chaos.prefills[1], chaos.decode]
    before = [thread_count(server) for server in unkilled]
    before[1] += 1  # the thread that probes unreachable prefill servers, which decode starts once
    draw = random.Random(chaos.seed)
    leaving = threading.Event()
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(Client(chaos, number, leaving).run) for number in range(CLIENTS)]
        try:
            for _ in range(FAULTS):
                inject_fault(chaos, draw)
        finally:
            leaving.set()
        asked = [client.result(2 * ANSWERED_S) for client in clients]
    assert [sentence for client in asked for sentence in client.wrong] == []
    answers = [answer for client in asked for answer in client.outcomes]
    assert answers.count("200") > FAULTS
    assert len(answers) - answers.count("200") > FAULTS
    assert chaos.decode.count("control_peers_lost") > 0
    chaos.decode.wait_ready(peers=2)
    check_tokens(chaos)
    for server in (*chaos.prefills, chaos.decode):
        server.check_clean()
    assert chaos.decode.count("checksum_errors") == 0
    wait_until(
        lambda: all(thread_count(server) <= threads for server, threads in zip(unkilled, before, strict=True)),
        10,
        "threads ended",
    )
