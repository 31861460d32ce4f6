"""pdserve behind the real sglang-router and its successor smg."""

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from tests.cluster.servers import HTTP, Cluster, Server, body, cluster, wait_until
from tests.optional_libraries import needs
from tests.ports import free_port

pytestmark = [needs("sglang_router"), needs("smg")]

RouterName = Literal["sglang_router", "smg"]
POOL = ("--kv-tokens", "8192", "--served-model-name", "m")
REFUSED_S = 1.0
KILLED_S = 2.0
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"input_ids": [1], "sampling_params": {"top_p": 2.0}}, "top_p"),
    ("/generate", {"input_ids": [1] * 5000}, "4096 tokens"),
    ("/v1/completions", {"model": "m", "prompt": "a", "suffix": "b"}, "suffix"),
    ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "a"}], "top_p": 0.0}, "top_p"),
]


class Router:
    """A router process in front of one prefill server and several decode servers."""

    def __init__(
        self,
        name: RouterName,
        prefill: Server,
        decodes: list[Server],
        log: Path,
        *,
        host: str = "127.0.0.1",
        launcher: Sequence[str] = (),
    ) -> None:
        """`launcher` is a command that runs the command of the router."""
        self.host, self.port, self.metrics_port = host, free_port(), free_port()
        command = [
            *launcher,
            sys.executable,
            "-m",
            f"{name}.launch_router",
            "--pd-disaggregation",
            "--policy",
            "round_robin",
        ]
        command += ["--host", host, "--port", str(self.port), "--prometheus-port", str(self.metrics_port)]
        command += ["--prefill", prefill.url, str(prefill.bootstrap_port)]
        for decode in decodes:
            command += ["--decode", decode.url]
        # More attempts, which it calls retries, than failures of a server after which it leaves that server alone: 10.
        # With the default of five, a request whose attempts all went to a killed server ends with 502.
        command += ["--retry-max-retries", "12", "--retry-backoff-multiplier", "1"]
        environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        with log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        self.servers = len(decodes) + 1

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = HTTP.get(f"{self.url}/workers", timeout=5).json()["workers"]
        return found

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, "the router has ended"
            with contextlib.suppress(httpx.TransportError):
                workers = self.workers()
                return len(workers) == self.servers and all(worker["is_healthy"] for worker in workers)
            return False

        wait_until(ready, 60, "router ready")

    def post(self, path: str, content: dict[str, Any]) -> tuple[httpx.Response, float]:
        started = time.monotonic()
        response = HTTP.post(f"{self.url}{path}", json=content, timeout=60)
        return response, time.monotonic() - started

    def open_circuits(self) -> set[str]:
        """URLs of servers to which the router sends no requests."""
        text = HTTP.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5).text
        return {url for url, state in re.findall(r'smg_worker_cb_state\{worker="([^"]*)"\} (\d)', text) if state != "0"}

    def close(self) -> None:
        self.process.kill()  # after SIGTERM it waits for five seconds
        self.process.wait(20)


@pytest.fixture(scope="module", params=["sglang_router", "smg"])
def routed(
    request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Router, Cluster]]:
    """A router, one prefill server and two decode servers, in this order."""
    with cluster(tmp_path_factory.mktemp("routed")) as servers:
        prefill = servers.add("prefill", llama, *POOL)
        flags = ("--prefill", prefill.endpoint, *POOL)
        decodes = [servers.add("decode", llama, *flags) for _ in range(2)]
        prefill.wait_ready(peers=2)
        for decode in decodes:
            decode.wait_ready(peers=1)
        router = Router(request.param, prefill, decodes, servers.directory / "router.log")
        try:
            router.wait_ready()
            yield router, servers
        finally:
            router.close()


def test_router_detects_the_api_and_merges_logprobs(routed: tuple[Router, Cluster]) -> None:
    router, servers = routed
    assert {worker.get("runtime_type", "sglang") for worker in router.workers()} == {"sglang"}
    wanted = body([1, 2, 3], 5, return_logprob=True, logprob_start_len=0)
    answer, _ = router.post("/generate", wanted)
    assert answer.status_code == 200, answer.text
    direct = HTTP.post(f"{servers.servers[1].url}/generate", json=wanted, timeout=60).json()
    assert answer.json()["output_ids"] == direct["output_ids"]
    scored = [[entry[1] for entry in result["meta_info"]["input_token_logprobs"]] for result in (answer.json(), direct)]
    assert scored == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize(("path", "content", "named"), WRONG)
def test_invalid_requests_through_the_router_are_refused_at_once(
    routed: tuple[Router, Cluster], path: str, content: dict[str, Any], named: str
) -> None:
    router, _ = routed
    refused, took_s = router.post(path, content)
    assert refused.status_code == 400, refused.text
    assert named in refused.text
    assert took_s < REFUSED_S


def test_router_merges_metrics_of_all_servers(routed: tuple[Router, Cluster]) -> None:
    """Although servers have different labels: only some have refused requests."""
    router, servers = routed
    HTTP.post(f"{servers.servers[1].url}/generate", json={}, timeout=5)
    merged = HTTP.get(f"{router.url}/engine_metrics", timeout=5)
    assert merged.status_code == 200, merged.text
    for server in servers.servers:
        assert re.search(rf"pdserve_kv_pages\{{[^}}]*{re.escape(server.url)}", merged.text)
    peers = re.findall(r"^pdserve_peer_paired\{(.*)\} 1", merged.text, re.MULTILINE)
    assert len(set(peers)) == 4, "two on prefill, both from one host, and one on each decode server"


def test_killed_decode_server_does_not_affect_clients_of_the_router(routed: tuple[Router, Cluster]) -> None:
    """Runs last, because it kills a decode server. The router sends its requests to the other one."""
    router, servers = routed
    prefill, killed, _ = servers.servers
    results: list[tuple[float, int, float]] = []
    stopping = threading.Event()

    def client() -> None:
        while not stopping.is_set():
            answer, took_s = router.post("/generate", body([1, 2, 3], 8))
            results.append((time.monotonic(), answer.status_code, took_s))

    clients = [threading.Thread(target=client) for _ in range(4)]
    for thread in clients:
        thread.start()
    wait_until(lambda: len(results) > 10, 20, "responses of both decode servers")
    killed_at = time.monotonic()
    killed.kill()
    wait_until(
        lambda: router.open_circuits() == {killed.url},
        20,
        f"the router sends nothing to the killed server only; prefill is {prefill.url}",
    )
    wait_until(lambda: sum(ended_at > killed_at for ended_at, *_ in results) > 20, 20, "responses of the other one")
    stopping.set()
    for thread in clients:
        thread.join()
    after = [(status, took_s) for ended_at, status, took_s in results if ended_at > killed_at]
    assert {status for status, _ in after} == {200}
    assert max(took_s for _, took_s in after) < KILLED_S
    assert router.open_circuits() == {killed.url}
