"""Servers that share a KV store: a real master, real memory and real processes over TCP."""

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pdserve.server.launch.store_node import find_master
from tests.checkpoints import load_reference, make_dsa_checkpoint, reference_greedy
from tests.cluster.servers import HTTP, Cluster, ForkedCommand, Server, wait_until
from tests.ports import free_port

pytestmark = pytest.mark.skipif(find_master() is None, reason="the Mooncake wheel has no mooncake_master")

PROMPT_TOKENS, NEW_TOKENS = 400, 24
POOL = ("--kv-tokens", "4096")


class Store:
    """`pdserve store`: a master that lends memory itself."""

    def __init__(self) -> None:
        port = free_port()
        self.url = f"mooncake://127.0.0.1:{port}"
        flags = ("--port", str(port), "--metrics-port", str(free_port()), "--memory", "64MiB")
        self._command = ForkedCommand("store", *flags)

    def kill(self) -> None:
        """SIGKILL, first to the master, which stops answering in the middle of whatever is in flight."""
        process = self._command.process
        if process.poll() is None:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for child in children:
                os.kill(int(child), signal.SIGKILL)
            process.kill()
            process.wait(10)
        self._command.close()


@pytest.fixture
def store() -> Iterator[Store]:
    started = Store()
    try:
        yield started
    finally:
        started.kill()


def uses_store(server: Server) -> bool:
    health = HTTP.get(f"{server.url}/health", timeout=5).json()
    return bool(health["kv_store"]["state"] == "ok")


def wait_for_store(*servers: Server) -> None:
    wait_until(lambda: all(map(uses_store, servers)), 60, "all servers use the store")


def wait_for_blocks(server: Server, blocks: int) -> None:
    """Wait until a server has written so many blocks in total."""
    wait_until(lambda: server.info()["counters"]["store_blocks_written"] >= blocks, 30, "blocks in the store")


def meta(response: Any) -> tuple[list[int], int]:
    answer = response.raise_for_status().json()
    return answer["output_ids"], answer["meta_info"]["cached_tokens"]


def test_second_server_continues_what_a_killed_one_has_computed(servers: Cluster, store: Store, llama: Path) -> None:
    """The servers have different page sizes and tensor parallelism. The answer of turn 1 is written by decode. Then the
    master is killed under load.
    """
    model, reference = llama, load_reference(llama)
    with_store = ("--kv-store", store.url, *POOL)
    first = servers.add("prefill", model, "--page-size", "16", *with_store)
    second = servers.add("prefill", model, "--page-size", "64", "--tp", "2", *with_store)
    both = f"{first.endpoint},{second.endpoint}"
    decode = servers.add("decode", model, "--prefill", both, *with_store)
    for server, peers in ((first, 1), (second, 1), (decode, 2)):
        server.wait_ready(peers=peers)
    wait_for_store(first, second, decode)

    draw = random.Random(5)
    prompt = draw.choices(range(256), k=PROMPT_TOKENS)
    answer, cached = meta(decode.post(prompt, NEW_TOKENS, **first.bootstrap))
    assert (answer, cached) == (reference_greedy(reference, prompt, NEW_TOKENS), 0)
    wait_for_blocks(first, PROMPT_TOKENS // 32)
    wait_for_blocks(decode, 1)  # the end of the prompt and the answer
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


def test_sparse_model_with_kv_in_host_memory(servers: Cluster, store: Store, tmp_path: Path) -> None:
    """Decode writes the answer from host memory; a prefill server of another page size and with two stages loads latent
    rows and keys.
    """
    indexer: dict[str, Any] = {"index_topk": 16, "index_topk_pattern": "FSSF", "index_head_dim": 32}
    model = make_dsa_checkpoint(tmp_path / "model", "glm_moe_dsa", **indexer)
    reference = load_reference(model)
    with_store = ("--kv-store", store.url)
    first = servers.add("prefill", model, "--page-size", "16", *POOL, *with_store)
    second = servers.add("prefill", model, "--page-size", "32", "--pp", "2", *POOL, *with_store)
    hisparse = ("--enable-hisparse", "--page-size", "8", "--hot-rows", "24", "--host-memory-gib", "0.5")
    memory = ("--kv-tokens", "2048", "--kv-memory-gib", "0.01")
    both = f"{first.endpoint},{second.endpoint}"
    decode = servers.add("decode", model, "--prefill", both, *hisparse, *memory, *with_store)
    for server, peers in ((first, 1), (second, 1), (decode, 2)):
        server.wait_ready(peers=peers)
    wait_for_store(first, second, decode)
    prompt = random.Random(7).choices(range(256), k=210)
    answer, cached = meta(decode.post(prompt, NEW_TOKENS, **first.bootstrap))
    assert (answer, cached) == (reference_greedy(reference, prompt, NEW_TOKENS), 0)
    wait_for_blocks(first, len(prompt) // 32)
    wait_for_blocks(decode, 1)
    turn = [*prompt, *answer, *prompt[:30]]
    output, cached = meta(decode.post(turn, NEW_TOKENS, **second.bootstrap))
    assert output == reference_greedy(reference, turn, NEW_TOKENS)
    assert cached == (len(prompt) + len(answer) - 1) // 32 * 32
    for server in (first, second, decode):
        server.check_clean()
