"""Role switches of real servers (`POST /role`) while other servers serve."""

import random
import threading
from pathlib import Path
from typing import Any

import httpx

from tests.checkpoints import VOCAB_SIZE, GreedyTokens, load_reference
from tests.cluster.servers import HTTP, Cluster, Server, body, wait_until
from tests.cluster.test_routers import Router

NEW_TOKENS = 8
POOL = ("--kv-tokens", "8192", "--served-model-name", "m")
PAUSE_S = 0.05


class LightLoad(threading.Thread):
    """Sends one prompt after another to a decode server and keeps the responses."""

    def __init__(self, server: Server, prompts: list[list[int]]) -> None:
        super().__init__(daemon=True)
        self.responses: list[tuple[int, httpx.Response]] = []
        self._server = server
        self._prompts = prompts
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(PAUSE_S):
            which = len(self.responses) % len(self._prompts)
            self.responses.append((which, self._server.post(self._prompts[which], NEW_TOKENS)))

    def end(self) -> None:
        self._ended.set()
        self.join(60)


def become(server: Server, role: str, **body: Any) -> None:
    """Switch the role; returns when the server is ready in it."""
    request = {"role": role, "wait": True, "drain": True, **body}
    response = HTTP.post(f"{server.url}/role", json=request, timeout=90)
    assert response.status_code == 200, response.text
    report = response.json()
    assert (report["role"], report["state"], report["switch"]["stage"]) == (role, "ready", "done")


def test_prefill_server_becomes_decode_and_prefill_again_while_others_serve(servers: Cluster, llama: Path) -> None:
    reference, draw = load_reference(llama), random.Random(17)
    prompts = [draw.choices(range(VOCAB_SIZE), k=length) for length in (20, 150, 300)]
    expected = [GreedyTokens(reference, prompt, NEW_TOKENS) for prompt in prompts]
    switching = servers.add("prefill", llama, *POOL, "--allow-role-switch", "--chunk-size", "64", leaders=3)
    staying = servers.add("prefill", llama, *POOL)
    decode = servers.add("decode", llama, "--prefill", f"{switching.endpoint},{staying.endpoint}", *POOL)
    switching.wait_ready(peers=1)
    decode.wait_ready(peers=2)
    assert switching.process is not None
    leader = switching.leader_pid()
    load = LightLoad(decode, prompts)
    load.start()
    try:
        become(switching, "decode", settings={"prefill": [staying.endpoint], "local_prefill": "never"})
        assert switching.leader_pid() != leader
        decode.wait_ready(peers=1)
        staying.wait_ready(peers=2)
        switching.wait_ready(peers=1)
        assert [switching.generate(prompt, NEW_TOKENS) for prompt in prompts] == expected
        assert switching.count("transfers") == len(prompts)

        become(switching, "prefill")
        assert switching.info()["config"]["chunk_size"] == 64
        switching.wait_ready(peers=1)
        decode.wait_ready(peers=2)
        staying.wait_ready(peers=1)
    finally:
        load.end()
    HTTP.post(f"{decode.url}/flush_cache", timeout=5).raise_for_status()
    before = switching.count("requests_finished")
    assert [decode.generate(prompt, NEW_TOKENS, **switching.bootstrap) for prompt in prompts] == expected
    assert switching.count("requests_finished") == before + len(prompts)
    assert len(load.responses) > 10
    failed = [response.text for _, response in load.responses if not response.is_success]
    assert failed == []
    assert all(response.json()["output_ids"] == expected[which] for which, response in load.responses)
    assert switching.process.poll() is None, "the frontend process has exited"
    for server in (decode, staying, switching):
        server.check_clean()


def test_router_uses_a_server_in_its_new_role(servers: Cluster, llama: Path) -> None:
    """At first the router still sends it requests as a decode server. Clients must not get empty outputs."""
    prefill = servers.add("prefill", llama, *POOL)
    flags = ("--prefill", prefill.endpoint, "--allow-role-switch", *POOL)
    decodes = [servers.add("decode", llama, *flags, leaders=number) for number in (1, 2)]
    decode, switching = (server.wait_ready(peers=1) for server in decodes)
    router = Router("sglang_router", prefill, decodes, servers.directory / "router.log")

    def outputs() -> list[int]:
        """The number of output tokens of each response."""
        bodies = [body([1, 2, 3, number], NEW_TOKENS) for number in range(8)]
        return [len(router.post("/generate", sent)[0].raise_for_status().json()["output_ids"]) for sent in bodies]

    try:
        router.wait_ready()
        assert outputs() == [NEW_TOKENS] * 8
        assert switching.count("requests_finished") == 4
        become(switching, "prefill", settings={"bootstrap_port": switching.bootstrap_port})
        assert outputs() == [NEW_TOKENS] * 8
        metrics = HTTP.get(f"{switching.url}/metrics", timeout=5).text
        assert 'pdserve_requests_refused_total{code="unavailable"}' in metrics, (
            "the router sent no request to the new prefill server"
        )

        (worker,) = (worker["id"] for worker in router.workers() if worker["url"] == switching.url)
        HTTP.delete(f"{router.url}/workers/{worker}", timeout=5).raise_for_status()
        wait_until(lambda: len(router.workers()) == 2, 10, "removed")
        added = {"url": switching.url, "worker_type": "prefill", "bootstrap_port": switching.bootstrap_port}
        HTTP.post(f"{router.url}/workers", json=added, timeout=5).raise_for_status()
        router.wait_ready()
        assert outputs() == [NEW_TOKENS] * 8
        assert switching.count("requests_finished") == 4
        decode.check_clean()
        switching.check_clean()
    finally:
        router.close()
