"""Servers that share a KV store: a real master, real memory and real processes over TCP."""

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pdserve.server.launch.store_node import find_master
from tests.checkpoints import load_reference, make_checkpoint, make_dsa_checkpoint, reference_greedy
from tests.cluster.servers import HTTP, Cluster, ForkedCommand, Server, cluster, wait_until
from tests.ports import free_port

pytestmark = pytest.mark.skipif(find_master() is None, reason="the Mooncake wheel has no mooncake_master")

PROMPT_TOKENS, NEW_TOKENS = 400, 24
POOL = ("--kv-tokens", "4096")


class Store:
    """`pdserve store`: a master that lends memory itself."""

    def __init__(self, port: int, memory: str = "64MiB") -> None:
        self.url = f"mooncake://127.0.0.1:{port}"
        self._ports = ("--port", str(port), "--metrics-port", str(free_port()))
        self._memory = memory
        self.start()

    def start(self) -> None:
        self._command = ForkedCommand("store", *self._ports, "--memory", self._memory)

    def kill(self) -> None:
        """SIGKILL, with its master, which then stops answering in the middle of whatever is in flight."""
        children = Path(f"/proc/{self._command.process.pid}/task/{self._command.process.pid}/children")
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)
        self._command.close()


def uses_store(server: Server) -> bool:
    health = HTTP.get(f"{server.url}/health", timeout=5).json()
    return bool(health["kv_store"]["state"] == "ok")


def stored_tokens(server: Server, blocks: int) -> None:
    """Wait until a server has written so many blocks in total."""
    wait_until(lambda: server.info()["counters"]["store_blocks_written"] >= blocks, 30, "blocks in the store")


class Started(NamedTuple):
    servers: Cluster
    store: Store
    model: Path
    reference: Any


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    model = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=4096)
    store = Store(free_port())
    try:
        with cluster(tmp_path_factory.mktemp("logs")) as servers:
            yield Started(servers, store, model, load_reference(model))
    finally:
        store.kill()


def meta(response: Any) -> tuple[list[int], int]:
    answer = response.raise_for_status().json()
    return answer["output_ids"], answer["meta_info"]["cached_tokens"]


def test_second_server_continues_what_a_killed_one_has_computed(started: Started) -> None:
    """The servers have different page sizes and tensor parallelism. The answer of turn 1 is written by decode. Then the
    master is killed under load.
    """
    servers, store, model, reference = started
    with_store = ("--kv-store", store.url, *POOL)
    first = servers.add("prefill", model, "--page-size", "16", *with_store)
    second = servers.add("prefill", model, "--page-size", "64", "--tp", "2", *with_store)
    both = f"{first.endpoint},{second.endpoint}"
    decode = servers.add("decode", model, "--prefill", both, *with_store)
    for server, peers in ((first, 1), (second, 1), (decode, 2)):
        server.wait_ready(peers=peers)
    for server in (first, second, decode):
        wait_until(lambda server=server: uses_store(server), 30, f"{server.role} uses the store")

    draw = random.Random(5)
    prompt = draw.choices(range(256), k=PROMPT_TOKENS)
    answer, cached = meta(decode.post(prompt, NEW_TOKENS, **first.bootstrap))
    assert (answer, cached) == (reference_greedy(reference, prompt, NEW_TOKENS), 0)
    stored_tokens(first, PROMPT_TOKENS // 32)
    stored_tokens(decode, 1)  # the end of the prompt and the answer
    first.kill()
    shared = [*prompt, *answer[:-1]]
    turn = [*shared, answer[-1], *draw.choices(range(256), k=40)]
    output, cached = meta(decode.post(turn, NEW_TOKENS, **second.bootstrap))
    assert output == reference_greedy(reference, turn, NEW_TOKENS)
    assert cached == len(shared) // 64 * 64
    assert second.count("store_tokens_loaded") == cached
    assert second.count("store_corrupt_cells") == 0

    prompts = [draw.choices(range(256), k=200) for _ in range(6)]
    with ThreadPoolExecutor() as pool:
        outputs = pool.map(lambda prompt: decode.generate(prompt, NEW_TOKENS, **second.bootstrap), prompts)
        store.kill()
        assert list(outputs) == [reference_greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]
    decode.generate(prompts[0][::-1], NEW_TOKENS, **second.bootstrap)  # at the latest this finds it dead
    wait_until(lambda: not uses_store(second), 30, "the outage in /health")
    assert HTTP.get(f"{second.url}/health", timeout=5).status_code == 200
    decode.generate(prompts[1][::-1], NEW_TOKENS, **second.bootstrap)
    for server in (second, decode):
        server.check_clean()


def test_sparse_model_with_kv_in_host_memory(tmp_path: Path) -> None:
    """Decode writes the answer from host memory; a prefill server of another page size loads latent rows and keys."""
    overrides = {"index_topk": 16, "index_topk_pattern": "FSSF", "index_head_dim": 32}
    model = make_dsa_checkpoint(tmp_path / "model", "glm_moe_dsa", **overrides)
    reference = load_reference(model)
    store = Store(free_port())
    try:
        with cluster(tmp_path) as servers:
            with_store = ("--kv-store", store.url, *POOL)
            first = servers.add("prefill", model, "--page-size", "16", *with_store)
            second = servers.add("prefill", model, "--page-size", "32", "--pp", "2", *with_store)
            hisparse = ("--enable-hisparse", "--page-size", "8", "--hot-rows", "24", "--host-memory-gib", "0.5")
            memory = ("--kv-tokens", "2048", "--kv-memory-gib", "0.01", "--kv-store", store.url)
            both = f"{first.endpoint},{second.endpoint}"
            decode = servers.add("decode", model, "--prefill", both, *hisparse, *memory)
            for server, peers in ((first, 1), (second, 1), (decode, 2)):
                server.wait_ready(peers=peers)
                wait_until(lambda server=server: uses_store(server), 30, f"{server.role} uses the store")
            prompt = random.Random(7).choices(range(256), k=200)
            answer, cached = meta(decode.post(prompt, NEW_TOKENS, **first.bootstrap))
            assert (answer, cached) == (reference_greedy(reference, prompt, NEW_TOKENS), 0)
            stored_tokens(first, 6)
            stored_tokens(decode, 1)
            turn = [*prompt, *answer, *prompt[:30]]
            output, cached = meta(decode.post(turn, NEW_TOKENS, **second.bootstrap))
            assert output == reference_greedy(reference, turn, NEW_TOKENS)
            assert cached == (len(prompt) + len(answer) - 1) // 32 * 32
            for server in (first, second, decode):
                server.check_clean()
    finally:
        store.kill()
