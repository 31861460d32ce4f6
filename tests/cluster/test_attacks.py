"""Attacks on the ports of a pair without a cluster key: requests of other clients are hardly delayed."""

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.checkpoints import load_reference, reference_greedy
from tests.cluster.servers import HTTP, Cluster, Server, body, cluster, wait_until
from tests.transfer.control.zmtp_peer import OLD_PROTOCOL, ZmtpPeer

PROMPT = [5, 6, 7]
POOL = ("--kv-tokens", "16384")
JSON = {"Content-Type": "application/json"}
WAIT_S = 0.2
IDLE_CONNECTIONS = int(os.environ.get("PDSERVE_IDLE_CONNECTIONS", "800"))
"""`make connections` opens 10,000 to each port."""
OTHERS_S = 3.0
"""During an attack, a request of another client may take twice its usual time and this much more. On an idle machine it
takes far less than a second more; test machines are busy."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Iterator[tuple[Cluster, Server, Server]]:
    with cluster(tmp_path_factory.mktemp("attacks")) as started:
        prefill, decode = started.pair(llama, POOL, (*POOL, "--prefill-wait-s", str(WAIT_S)))
        yield started, prefill, decode
        decode.check_clean()


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[int]:
    return reference_greedy(load_reference(llama), PROMPT, 8)


@contextmanager
def another_client(decode: Server, expected: list[int]) -> Iterator[list[float]]:
    """A client that sends one request after another; yields the seconds that each took."""
    times: list[float] = []
    done = threading.Event()

    def send() -> None:
        while not done.is_set():
            before = time.monotonic()
            assert decode.generate(PROMPT, 8) == expected
            times.append(time.monotonic() - before)
            done.wait(0.05)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        wait_until(lambda: len(times) > 3, 20, "responses before the attack")
        usual_s = max(times)
        times.clear()
        yield times
        done.set()
        sending.result()
    assert times
    assert max(times) < 2 * usual_s + OTHERS_S, times


def test_old_protocol_messages_do_not_delay_others(pair: tuple[Cluster, Server, Server], expected: list[int]) -> None:
    _, prefill, decode = pair
    with another_client(decode, expected) as times, ExitStack() as stack:
        for _ in range(5):
            attacker = stack.enter_context(socket.create_connection(("127.0.0.1", prefill.bootstrap_port)))
            attacker.sendall(OLD_PROTOCOL)
        wait_until(lambda: len(times) > 10, 20, "responses during the attack")
    assert prefill.count("control_handler_errors") == 0
    prefill.check_clean()


def test_endless_messages_are_cut_and_do_not_delay_others(
    pair: tuple[Cluster, Server, Server], expected: list[int]
) -> None:
    _, prefill, decode = pair
    with another_client(decode, expected), ExitStack() as stack:
        attackers = [stack.enter_context(ZmtpPeer(prefill.bootstrap_port)) for _ in range(8)]
        with ThreadPoolExecutor(len(attackers)) as pool:
            sent = list(pool.map(lambda attacker: attacker.send_frame_until_cut(60 << 20), attackers))
        assert max(sent) < 60 << 20
    assert prefill.count("control_connections_cut") >= len(attackers)
    prefill.check_clean()


def test_silent_prefill_endpoints_do_not_exhaust_decode_sockets(
    pair: tuple[Cluster, Server, Server], llama: Path, expected: list[int]
) -> None:
    """1,200 endpoints that accept connections and send nothing. A prefill server that a request names still pairs."""
    started, prefill, decode = pair
    allow_open_files(4096)
    with another_client(decode, expected), ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(1200)]

        def status_of(listener: socket.socket) -> int:
            where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": listener.getsockname()[1]}
            connection = HTTPConnection("127.0.0.1", decode.port, timeout=60)  # takes a tenth of the time of httpx
            with closing(connection):
                connection.request("POST", "/generate", json.dumps(body(PROMPT, 1, **where)), JSON)
                return connection.getresponse().status

        with ThreadPoolExecutor(40) as pool:
            assert set(pool.map(status_of, listeners)) == {503}
        another = started.add("prefill", llama, *POOL).wait_ready()
        wait_until(lambda: paired(decode, another), 10, "paired")
    prefill.check_clean()


@pytest.mark.parametrize("port", ["decode HTTP", "prefill HTTP", "control"])
def test_idle_connections_do_not_delay_others(
    pair: tuple[Cluster, Server, Server], expected: list[int], port: str
) -> None:
    """When the control thread handled all new connections before the next heartbeat, 5,000 stopped it for 2.3 s."""
    _, prefill, decode = pair
    number = {"decode HTTP": decode.port, "prefill HTTP": prefill.port, "control": prefill.bootstrap_port}[port]
    allow_open_files(IDLE_CONNECTIONS + 1000)
    lost = decode.count("control_peers_lost")
    with another_client(decode, expected) as times, ExitStack() as stack:
        for _ in range(IDLE_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", number), timeout=60))
        during = len(times)
        for server in (prefill, decode):
            assert HTTP.get(f"{server.url}/health", timeout=10).status_code == 200
        wait_until(lambda: len(times) > during + 3, 20, "responses beside the idle connections")
    assert decode.count("control_peers_lost") == lost
    prefill.check_clean()


def allow_open_files(count: int) -> None:
    """Raise the limit of this process, within its hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, count)), hard))


def paired(decode: Server, prefill: Server) -> bool:
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port}
    return HTTP.post(f"{decode.url}/generate", json=body(PROMPT, 1, **where), timeout=60).status_code == 200
