"""Processes are killed, stopped and restarted while requests run.

Every request ends in bounded time, all pages are freed, and the servers recover without help.
"""

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.scheduler.shutdown import exit_s
from tests.checkpoints import VOCAB_SIZE, GreedyTokens, load_reference
from tests.cluster.servers import HTTP, Cluster, Server, body, cluster, wait_until
from tests.processes import gone, stop_process

NOTICED_S = 2.0
ANSWERED_S = 3.0
SLACK_S = 1.0  # test machines are busy
LONG_PROMPT = [index % VOCAB_SIZE for index in range(2000)]
SHORT_PROMPT = [5, 6, 7]
COMMON = ("--kv-tokens", "16384", "--shutdown-timeout-s", "30")
SLOW_PREFILL = (*COMMON, "--page-size", "8", "--chunk-size", "8")
"""Slow enough for tests to see a prompt being computed: the state in /server_info may be a tenth of a second old."""
DECODE = (*COMMON, "--quarantine-s", "1.5")


class Client(threading.Thread):
    """Sends one request in the background. Keeps the response, or the connection error, and the time."""

    def __init__(self, server: Server, prompt: list[int], new_tokens: int, **extra: Any) -> None:
        super().__init__(daemon=True)
        self._server, self._body = server, body(prompt, new_tokens, **extra)
        self.response: httpx.Response | None = None
        self.broken: httpx.TransportError | None = None
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        try:
            self.response = HTTP.post(f"{self._server.url}/generate", json=self._body, timeout=60)
        except httpx.TransportError as error:
            self.broken = error
        self.ended_at = time.monotonic()

    def wait(self) -> httpx.Response:
        self.join(60)
        assert self.response is not None, f"no response: {self.broken!r}"
        return self.response


@pytest.fixture(scope="module")
def expected(llama: Path) -> GreedyTokens:
    return GreedyTokens(load_reference(llama), SHORT_PROMPT, 8)


@pytest.fixture(scope="module")
def all_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("failures")) as started:
        yield started


@pytest.fixture
def pair(all_servers: Cluster, llama: Path) -> tuple[Server, Server]:
    """A prefill and a decode server with empty caches: those of the previous test, if both still run."""
    last = all_servers.servers[-2:]
    if not last or any(server.process is None or server.process.poll() is not None for server in last):
        all_servers.close()
        return all_servers.pair(llama, SLOW_PREFILL, DECODE)
    prefill, decode = last
    for server in last:
        server.signal_all(signal.SIGCONT)  # a failed test may have left it stopped
        server.wait_ready(peers=1)
        wait_until(server.idle, 15, f"{server.role} idle")
        HTTP.post(f"{server.url}/flush_cache", timeout=5).raise_for_status()
    return prefill, decode


def in_state(server: Server, state: str, count: int = 1) -> None:
    wait_until(lambda: server.info()["states"][state] >= count, 20, f"{count} requests {state} on {server.role}")


def wait_for_transfers(prefill: Server) -> None:
    """Until prefill has at least two transfers. Decode keeps prompts that prefill would not begin soon: of three
    prompts, prefill has two on a slow machine and all on a fast one.
    """
    wait_until(lambda: sum(prefill.info()["states"].values()) >= 2, 20, "two transfers")


def test_killed_prefill_fails_its_requests_in_time_and_can_restart(
    pair: tuple[Server, Server], expected: GreedyTokens
) -> None:
    prefill, decode = pair
    clients = [Client(decode, LONG_PROMPT, 4) for _ in range(2)]
    in_state(decode, "prefilling", len(clients))
    killed_at = time.monotonic()
    prefill.kill()
    for client in clients:
        response = client.wait()
        assert response.status_code == 503, response.text
        assert "prefill server lost" in response.json()["error"]["message"]
        assert client.ended_at - killed_at <= NOTICED_S + ANSWERED_S + SLACK_S
    prefill.start().wait_ready(peers=1)
    decode.wait_ready(peers=1)
    assert decode.generate(SHORT_PROMPT, 8) == expected
    prefill.check_clean()
    decode.check_clean()


def test_request_moves_to_another_prefill_when_its_own_is_killed(servers: Cluster, llama: Path) -> None:
    """The prefill server is lost before the first token, so the request can be sent to another one."""
    first, second = (servers.add("prefill", llama, *SLOW_PREFILL) for _ in range(2))
    decode = servers.add("decode", llama, "--prefill", f"{first.endpoint},{second.endpoint}", *DECODE)
    for server in (first, second):
        server.wait_ready()
    decode.wait_ready(peers=2)
    client = Client(decode, LONG_PROMPT, 8)
    busy: list[Server] = []

    def computes() -> bool:
        busy[:] = [server for server in (first, second) if server.info()["states"]["computing"]]
        return bool(busy)

    wait_until(computes, 20, "one of them computes")
    busy[0].kill()
    response = client.wait()
    assert response.status_code == 200, response.text
    (other,) = {first, second} - {busy[0]}
    assert other.count("requests_finished") == 1, "the other prefill server did not compute the prompt"
    assert decode.count("redispatches") == 1
    assert response.json()["output_ids"] == decode.generate(LONG_PROMPT, 8)
    decode.check_clean()


def test_pages_stay_in_quarantine_while_prefill_is_stopped(pair: tuple[Server, Server], expected: GreedyTokens) -> None:
    """A stopped prefill may still write: its pages stay in quarantine until it continues and acknowledges the abort."""
    prefill, decode = pair
    client = Client(decode, LONG_PROMPT, 4)
    in_state(decode, "prefilling")
    stopped_at = time.monotonic()
    prefill.freeze()
    assert client.wait().status_code == 503
    assert client.ended_at - stopped_at <= NOTICED_S + ANSWERED_S + SLACK_S
    time.sleep(2.5)  # longer than the quarantine
    assert decode.info()["gauges"]["quarantined_pages"] > 0, "pages that a stopped writer may write were freed"
    prefill.signal_all(signal.SIGCONT)
    decode.wait_ready(peers=1)
    decode.check_clean()
    assert decode.generate(SHORT_PROMPT, 8) == expected
    prefill.check_clean()


def test_prefill_frees_pages_of_a_killed_decode_server(pair: tuple[Server, Server], expected: GreedyTokens) -> None:
    prefill, decode = pair
    prefilling = [Client(decode, LONG_PROMPT, 4) for _ in range(2)]
    in_state(prefill, "computing")
    decode.kill()
    killed_at = time.monotonic()
    for client in prefilling:
        client.join(10)
        assert client.broken is not None
    wait_until(prefill.idle, NOTICED_S + ANSWERED_S + SLACK_S, "prefill freed the pages of the killed decode server")
    assert time.monotonic() - killed_at <= NOTICED_S + ANSWERED_S + SLACK_S
    decode.start().wait_ready(peers=1)
    assert decode.generate(SHORT_PROMPT, 8) == expected
    prefill.check_clean()
    decode.check_clean()


@pytest.mark.parametrize("phase", ["prefilling", "running"])
@pytest.mark.parametrize("stream", [True, False])
def test_client_disconnect_frees_pages_on_both_sides(pair: tuple[Server, Server], phase: str, stream: bool) -> None:
    prefill, decode = pair
    prompt, new_tokens = (LONG_PROMPT, 50) if phase == "prefilling" else (SHORT_PROMPT, 3000)
    payload = json.dumps(body(prompt, new_tokens, stream=stream)).encode()
    aborted = decode.count("requests_aborted")
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", decode.port)) as connection:
        connection.sendall(head.encode() + payload)
        in_state(decode, phase)
    freed_s = wait_until(lambda: decode.idle() and prefill.idle(), 5, "both sides idle after the disconnect")
    assert freed_s <= 1.0 + SLACK_S
    assert decode.info()["counters"]["requests_aborted"] == aborted + 1
    prefill.check_clean()
    decode.check_clean()


def test_sigterm_drains_running_requests_and_exits(pair: tuple[Server, Server]) -> None:
    """Running requests finish, new ones are refused, and both servers exit with 0."""
    prefill, decode = pair
    assert decode.process is not None
    ask = body(SHORT_PROMPT, 600, stream=True)
    with HTTP.stream("POST", f"{decode.url}/generate", json=ask, timeout=60) as running:
        lines = running.iter_lines()
        next(lines)
        decode.process.terminate()
        wait_until(lambda: HTTP.get(f"{decode.url}/health", timeout=5).status_code == 503, 5, "stopping")
        assert decode.post(SHORT_PROMPT, 1).status_code == 503
        *_, last, done = (line.removeprefix("data: ") for line in lines if line)
    assert done == "[DONE]"
    assert len(json.loads(last)["output_ids"]) == 600
    assert decode.process.wait(15) == 0
    assert prefill.stop() == 0


def test_sigterm_for_prefill_lets_its_requests_finish(pair: tuple[Server, Server]) -> None:
    """Its requests are computed and sent, and the last message reaches decode before the connection closes."""
    prefill, decode = pair
    client = Client(decode, LONG_PROMPT, 4)
    in_state(prefill, "computing")
    assert prefill.stop() == 0
    response = client.wait()
    assert response.status_code == 200, response.text
    assert len(response.json()["output_ids"]) == 4
    decode.check_clean()


def test_sigterm_ends_prefill_in_time_while_its_transfers_hang(servers: Cluster, llama: Path) -> None:
    """Decode is stopped: prefill has to cancel its writes and to exit although no message is acknowledged."""
    drain_s = 0.2
    prefill, decode = servers.pair(llama, (*SLOW_PREFILL, "--shutdown-timeout-s", str(drain_s)), DECODE)
    clients = [Client(decode, [1 + number, *LONG_PROMPT], 4) for number in range(3)]
    wait_for_transfers(prefill)
    decode.freeze()
    assert prefill.process is not None
    stopped_at = time.monotonic()
    prefill.process.terminate()
    assert prefill.process.wait(30) == 0
    assert time.monotonic() - stopped_at < drain_s + exit_s("cpu") + SLACK_S
    assert re.search("SIGTERM: draining [23] transfers for up to 0.2 s", prefill.log.read_text())
    decode.signal_all(signal.SIGCONT)
    for client in clients:
        assert client.wait().status_code == 503


def test_requests_wait_for_the_restart_of_the_only_prefill_without_failing(servers: Cluster, llama: Path) -> None:
    """Without its frontend the leader fails its transfers and ends. Requests wait prefill_wait_s for a new server."""
    prefill, decode = servers.pair(llama, SLOW_PREFILL, (*DECODE, "--prefill-wait-s", "60"))
    clients = [Client(decode, [1 + number, *LONG_PROMPT], 4) for number in range(3)]
    wait_for_transfers(prefill)
    leader = prefill.leader_pid()
    assert prefill.process is not None
    prefill.process.kill()
    prefill.process.wait(5)
    wait_until(lambda: gone(leader), 6, "the orphaned leader ended")
    assert all(client.is_alive() for client in clients)
    prefill.start().wait_ready(peers=1)
    assert [client.wait().status_code for client in clients] == [200] * 3
    decode.check_clean()


def test_request_timeout_holds_while_the_decode_leader_is_stopped(
    pair: tuple[Server, Server], expected: GreedyTokens
) -> None:
    prefill, decode = pair
    stop_process(decode.leader_pid())
    before = time.monotonic()
    response = decode.post(SHORT_PROMPT, 8, timeout=1)
    assert time.monotonic() - before < 1 + SLACK_S + SLACK_S
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline")
    os.kill(decode.leader_pid(), signal.SIGCONT)
    decode.wait_ready(peers=1)
    assert decode.generate(SHORT_PROMPT, 8) == expected
    prefill.check_clean()
    decode.check_clean()


def test_stream_ends_with_an_error_when_the_decode_leader_is_killed(pair: tuple[Server, Server]) -> None:
    """The frontend ends all streams with an error and exits with 1."""
    _, decode = pair
    events: list[str] = []
    killed_at = 0.0
    with HTTP.stream(
        "POST", f"{decode.url}/generate", json=body(SHORT_PROMPT, 3000, stream=True), timeout=60
    ) as response:
        for line in response.iter_lines():
            if line:
                events.append(line.removeprefix("data: "))
            if len(events) == 5 and not killed_at:
                killed_at = time.monotonic()
                os.kill(decode.leader_pid(), signal.SIGKILL)
    assert time.monotonic() - killed_at <= ANSWERED_S
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "unavailable"
    assert decode.process is not None
    assert decode.process.wait(10) == 1


def test_leader_ends_when_its_frontend_is_killed(servers: Cluster, llama: Path) -> None:
    prefill = servers.add("prefill", llama, *SLOW_PREFILL).wait_ready()
    leader = prefill.leader_pid()
    assert prefill.process is not None
    prefill.process.kill()
    prefill.process.wait(5)
    wait_until(lambda: gone(leader), 6, "the orphaned leader ended")
