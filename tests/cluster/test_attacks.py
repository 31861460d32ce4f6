"""What strangers can do to a running pair without a cluster key, and what it costs others: less than a second."""

import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import load_reference, reference_greedy
from tests.cluster.servers import HTTP, Cluster, Server, body, cluster, wait_until
from tests.transfer.control.zmtp_peer import OLD_PROTOCOL, ZmtpPeer

PROMPT = [5, 6, 7]
POOL = ("--kv-tokens", "16384")
WAIT_S = 0.2
OTHERS_S = 1.0
"""How much longer an attack may make a request of somebody else take."""


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
def somebody_else(decode: Server, expected: list[int]) -> Iterator[list[float]]:
    """Asks all the time; the seconds that each answer took."""
    times: list[float] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            before = time.monotonic()
            assert decode.generate(PROMPT, 8) == expected
            times.append(time.monotonic() - before)
            done.wait(0.05)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        wait_until(lambda: len(times) > 3, 20, "answers before the attack")
        usual_s = max(times)
        times.clear()
        yield times
        done.set()
        asking.result()
    assert times
    assert max(times) < usual_s + OTHERS_S, times


def test_messages_of_an_old_protocol(pair: tuple[Cluster, Server, Server], expected: list[int]) -> None:
    _, prefill, decode = pair
    with somebody_else(decode, expected) as times, ExitStack() as stack:
        for _ in range(5):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", prefill.bootstrap_port)))
            stranger.sendall(OLD_PROTOCOL)
        wait_until(lambda: len(times) > 10, 20, "answers during the attack")
    assert prefill.count("control_handler_errors") == 0
    prefill.check_clean()


def test_messages_that_never_end(pair: tuple[Cluster, Server, Server], expected: list[int]) -> None:
    _, prefill, decode = pair
    with somebody_else(decode, expected), ExitStack() as stack:
        strangers = [stack.enter_context(ZmtpPeer(prefill.bootstrap_port)) for _ in range(8)]
        with ThreadPoolExecutor(len(strangers)) as pool:
            sent = list(pool.map(lambda stranger: stranger.send_frame_until_cut(60 << 20), strangers))
        assert max(sent) < 60 << 20
    assert prefill.count("control_connections_cut") >= len(strangers)
    prefill.check_clean()


def test_prefill_servers_that_accept_and_never_answer(
    pair: tuple[Cluster, Server, Server], llama: Path, expected: list[int]
) -> None:
    """1,200 such endpoints used up decode's sockets. Afterwards a prefill server that a request names is paired."""
    started, prefill, decode = pair
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    with somebody_else(decode, expected), ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(1200)]

        def ask(listener: socket.socket) -> int:
            where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": listener.getsockname()[1]}
            with httpx.Client(trust_env=False, verify=False) as client:
                return client.post(f"{decode.url}/generate", json=body(PROMPT, 1, **where), timeout=60).status_code

        with ThreadPoolExecutor(40) as pool:
            assert set(pool.map(ask, listeners)) == {503}
        another = started.add("prefill", llama, *POOL).wait_ready()
        wait_until(lambda: paired(decode, another), 10, "it is paired")
    prefill.check_clean()


def paired(decode: Server, prefill: Server) -> bool:
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port}
    return HTTP.post(f"{decode.url}/generate", json=body(PROMPT, 1, **where), timeout=60).status_code == 200
