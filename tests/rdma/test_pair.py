"""Servers whose KV goes over RDMA, in the virtual machine of `make test-rdma`: a prefill server, a decode server, and
one with HiSparse, whose rows land in host memory. All are forked from one process, since importing torch takes minutes.
"""

import json
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cluster import forkserver, servers
from tests.cluster.servers import Server, cluster, wait_until
from tests.rdma.figures import report
from tests.rdma.peer import BACK_S, sent_packets
from tests.rdma.receiver import HOST

MODEL = Path(os.environ.get("PDSERVE_RDMA_MODEL", ""))
"""A folder that `checkpoint.py` has written on the host."""

pytestmark = pytest.mark.skipif(not HOST, reason="needs an RDMA device: make test-rdma")

START_S = 600.0
ANSWER_S = 300.0
MORE_S = 3.0
ATTEMPTS = 3
"""The host may be busy with other work during a request."""
DOWN_S = 2.0
PAGE, LAYERS = 8, 2
KV_TOKENS = 512
COMMON = (
    *("--host", HOST, "--cpu-kernels", "torch", "--page-size", str(PAGE), "--kv-tokens", str(KV_TOKENS)),
    *("--no-prefix-cache", "--heartbeat-interval-s", "1", "--peer-timeout-s", "30"),
    *("--ib-device", "rxe0"),  # other tests have added one that stays up
)
HOT_ROWS, HOT_PAGES = 16, 8
"""As many rows as the model selects, and fewer pages than the longest prompt has."""
ROW_BYTES, KEY_BYTES = (48 + 16) * 4, 32 * 4
MEMORY_BYTES = KV_TOKENS * LAYERS * KEY_BYTES + HOT_PAGES * PAGE * LAYERS * ROW_BYTES
HISPARSE = (
    *("--enable-hisparse", "--hot-rows", str(HOT_ROWS), "--max-running-requests", "2", "--host-memory-gib", "0.1"),
    *("--kv-memory-gib", str(1.01 * MEMORY_BYTES / (1 << 30))),
)


class Servers(NamedTuple):
    prefill: Server
    decode: Server
    hisparse: Server
    answers: list[tuple[list[int], list[int]]]
    """Prompts, and what transformers answers."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with pytest.MonkeyPatch.context() as patch, cluster(tmp_path_factory.mktemp("servers")) as started:
        patch.setattr(servers, "START_TIMEOUT_S", START_S)
        patch.setattr(forkserver, "START_S", START_S)
        patch.setenv(forkserver.CPU_KERNELS, "torch")
        patch.setenv("PDSERVE_CLUSTER_KEY", secrets.token_hex(32))
        began = time.monotonic()
        servers.fork_server()
        imported = time.monotonic()
        running: list[Server] = []
        try:
            prefill = started.add("prefill", MODEL, *COMMON, "--chunk-size", "32")
            running.append(prefill)
            for flags in ((), HISPARSE):
                running.append(started.add("decode", MODEL, *COMMON, "--prefill", prefill.endpoint, *flags))
                running[-1].wait_ready(peers=1)
            prefill.wait_ready(peers=2)
            print(f"imported in {imported - began:.0f} s, started in {time.monotonic() - imported:.0f} s")
            answers = json.loads((MODEL / "answers.json").read_text(encoding="ascii"))
            yield Servers(running[0], running[1], running[2], answers)
        finally:
            for server in running:
                print(f"log of {server.role}:\n{server.log.read_text()}")


def ask(server: Server, prompt: list[int], tokens: list[int]) -> tuple[dict[str, Any], float]:
    """Check an answer. Returns it, and how long it took."""
    started = time.monotonic()
    answer: dict[str, Any] = server.post(prompt, len(tokens), ANSWER_S).raise_for_status().json()
    assert answer["output_ids"] == tokens
    return answer, time.monotonic() - started


@contextmanager
def written_over(transport: str, prefill: Server) -> Iterator[None]:
    """All KV that is written inside goes over this transport, and some is."""
    before = sent_bytes(prefill)
    yield
    sent = {name: size_bytes - before[name] for name, size_bytes in sent_bytes(prefill).items()}
    print(f"bytes: {sent}")
    assert sent.pop(transport) > 0
    assert not any(sent.values())


def sent_bytes(prefill: Server) -> dict[str, int]:
    """KV by transport, as the server counts it."""
    counters = prefill.settled_info()["counters"]
    return {name: counters[f"transport_bytes_{name}"] for name in ("rdma", "tcp")}


def all_use_rdma(prefill: Server) -> bool:
    return all(set(peer["transports"].values()) == {"rdma"} for peer in prefill.info()["peers"])


class Outage:
    """The port is down for DOWN_S. Ends when it is up again."""

    def __init__(self) -> None:
        set_port("down")
        self._up = threading.Timer(DOWN_S, set_port, ["up"])
        self._up.start()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._up.join()


def set_port(state: str) -> None:
    subprocess.run(["ip", "link", "set", "eth0", state], check=True)


def test_answers_over_rdma_are_those_of_transformers(pair: Servers) -> None:
    with written_over("rdma", pair.prefill):
        for prompt, tokens in pair.answers:
            _, seconds = ask(pair.decode, prompt, tokens)
            print(f"{len(prompt)} tokens: {seconds:.1f} s")
    assert pair.decode.count("chunks_verified") > 0


def test_rdma_writes_into_the_host_memory_of_hisparse(pair: Servers) -> None:
    with written_over("rdma", pair.prefill):
        for prompt, tokens in pair.answers:
            answer, seconds = ask(pair.hisparse, prompt, tokens)
            print(f"{len(prompt)} tokens: {seconds:.1f} s, {answer['meta_info']['kv_path']}")
    assert answer["meta_info"]["kv_path"] == "host"


def test_a_request_after_the_port_has_failed_goes_another_way_and_rdma_comes_back(pair: Servers) -> None:
    """Also if its KV is written when the port is up again, which Mooncake does not use yet."""
    assert any(answered_in_time_after_an_outage(pair) for _ in range(ATTEMPTS)), "always too late"


def answered_in_time_after_an_outage(pair: Servers) -> bool:
    prompt, tokens = pair.answers[-1]
    _, undisturbed_s = ask(pair.hisparse, prompt, tokens)
    with written_over("tcp", pair.prefill), Outage():
        _, seconds = ask(pair.hisparse, prompt, tokens)
    fault = "port down for 2 s before a request"
    check_rdma_comes_back(pair, fault)
    print(f"undisturbed {undisturbed_s:.1f} s, after the outage {seconds:.1f} s")
    if seconds >= undisturbed_s + MORE_S:
        return False
    report(f"{fault}: answered later than undisturbed by", seconds - undisturbed_s, MORE_S)
    return True


def test_a_request_whose_writes_the_port_cuts_off_is_repeated_and_rdma_comes_back(pair: Servers) -> None:
    prompt, tokens = pair.answers[-1]
    _, undisturbed_s = ask(pair.hisparse, prompt, tokens)
    idle = sent_packets()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, pair.hisparse, prompt, tokens)
        while sent_packets() == idle:
            time.sleep(0.001)
        with Outage():
            _, seconds = asked.result()
    print(f"undisturbed {undisturbed_s:.1f} s, cut off {seconds:.1f} s")
    check_rdma_comes_back(pair, "port down for 2 s during a request")
    assert seconds < 2 * undisturbed_s + MORE_S  # the prompt is computed again


def check_rdma_comes_back(pair: Servers, fault: str) -> None:
    seconds = wait_until(lambda: all_use_rdma(pair.prefill), BACK_S, "RDMA is used again")
    report(f"{fault}: used again by the servers", seconds, BACK_S)
    with written_over("rdma", pair.prefill):
        for server in (pair.decode, pair.hisparse):
            ask(server, *pair.answers[0])


def test_the_servers_are_healthy_and_hold_nothing(pair: Servers) -> None:
    for server in (pair.prefill, pair.decode, pair.hisparse):
        server.check_clean()
        assert server.stop() == 0
