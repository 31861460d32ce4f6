"""HiSparse servers on a GPU, with KV in pinned memory and swap-in inside CUDA graphs: tokens equal transformers."""

import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.checkpoints import VOCAB_SIZE, load_reference, make_dsa_checkpoint, reference_greedy
from tests.cluster.servers import Cluster, Server, cluster, wait_until

pytestmark = pytest.mark.gpu

TOPK = 16
NEW_TOKENS = 48
LENGTHS = (3, 15, 30, 60, 300, 1500)
"""Within the hot buffer, crossing it while generating, and far beyond it."""
PAGE = 8
ROW_BYTES, KEY_BYTES = 64 * 4, 32 * 4
"""Bytes per token: 48 + 16 floats in each layer, 32 floats for each indexer."""
KV_TOKENS = 8192
ALL_PAGES = sum(-(-(length + NEW_TOKENS - 1) // PAGE) for length in LENGTHS)
"""Pages for all prompts at once. With exactly these, no page is lent while all run."""
LONG_TOKENS, LONG_S = 6000, 300.0
"""Tokens of a long-running request, and how long it may take while other tests use the GPU."""
LONG_PAGES = ALL_PAGES + -(-(LENGTHS[0] + LONG_TOKENS - 1) // PAGE)
"""Pages for all prompts and one long-running request."""


def hisparse(
    hot_rows: int, hot_pages: int, kv_tokens: int = KV_TOKENS, largest_stage: tuple[int, int] = (4, 2)
) -> tuple[str, ...]:
    """Flags of a decode server with an index for `kv_tokens` tokens and `hot_pages` hot pages beside it;
    `largest_stage` is its layers and indexers.
    """
    layers, indexers = largest_stage
    page_bytes = PAGE * layers * ROW_BYTES
    covered = -(-kv_tokens * indexers * KEY_BYTES // page_bytes)
    return (
        "--enable-hisparse",
        *("--hot-rows", str(hot_rows), "--kv-tokens", str(kv_tokens), "--host-memory-gib", "0.5"),
        *("--kv-memory-gib", str((covered + hot_pages + 0.25) * page_bytes / (1 << 30))),
    )


def buffers(hot_rows: int, count: int) -> int:
    """Hot pages that `count` buffers take."""
    return count * (hot_rows // PAGE + 1)


def squeezed(times: int, largest_stage: tuple[int, int] = (4, 2)) -> tuple[str, ...]:
    """A hot pool with one buffer per request and four pages more: fully resident requests become evicting."""
    hot_pages = buffers(times * TOPK, len(LENGTHS)) + 4
    return hisparse(times * TOPK, hot_pages, kv_tokens=ALL_PAGES * PAGE, largest_stage=largest_stage)


DECODES = {
    "1k-graphs": squeezed(1),
    # few request slots, so that few hot pages are kept for others and short prompts go to the hot pool
    "2k-graphs": (*squeezed(2), "--max-running-requests", str(len(LENGTHS))),
    "4k-graphs": squeezed(4),
    "2k-eager": (*squeezed(2), "--no-cuda-graphs"),
    "2k-tp2": (*squeezed(2), "--tp", "2"),
    "4k-pp2": (*squeezed(4, (3, 1)), "--pp", "2"),  # layers that share a selection stay together: three and one
    "lending": (
        *hisparse(2 * TOPK, buffers(2 * TOPK, len(LENGTHS)), kv_tokens=2 * KV_TOKENS),
        "--no-prefix-cache",
    ),
    "pressed": (
        *hisparse(TOPK, buffers(TOPK, len(LENGTHS) + 1), kv_tokens=LONG_PAGES * PAGE),
        *("--growth-tokens", str(LONG_TOKENS), "--no-prefix-cache", "--max-running-requests", str(len(LENGTHS) + 1)),
    ),
    "short": (
        *hisparse(2 * TOPK, buffers(2 * TOPK, 2), kv_tokens=1600),
        *("--growth-tokens", "8", "--no-prefix-cache"),
    ),
    "plain": ("--kv-tokens", str(KV_TOKENS)),
}


class Servers(NamedTuple):
    """A prefill server without HiSparse settings, decode servers of all kinds, and the tokens of transformers."""

    prefill: Server
    decodes: dict[str, Server]
    prompts: list[list[int]]
    expected: list[list[int]]

    def decode(self, name: str) -> Server:
        """Waits here, so that a server that does not start fails only the tests that use it."""
        return self.decodes[name].wait_ready(peers=1)


def start(started: Cluster, model: Path, flags: tuple[str, ...], decodes: dict[str, tuple[str, ...]]) -> list[Server]:
    """Start a prefill server and these decode servers, all at once; does not wait until they are ready."""
    prefill = started.add("prefill", model, *flags, "--page-size", "16", "--chunk-size", "48", "--kv-tokens", "8192")
    shared = (*flags, "--prefill", prefill.endpoint, "--page-size", str(PAGE))
    servers = [started.add("decode", model, *shared, *own) for own in decodes.values()]
    return [prefill, *servers]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    model = make_dsa_checkpoint(
        tmp_path_factory.mktemp("model"),
        "glm_moe_dsa",
        index_topk=TOPK,
        index_topk_pattern="FSSF",
        max_position_embeddings=8192,
        first_k_dense_replace=4,  # without experts, float32 steps are captured
    )
    with cluster(tmp_path_factory.mktemp("logs")) as started:
        flags = ("--device", "cuda:0", "--dtype", "float32")  # ranks of one server share the GPU
        prefill, *decodes = start(started, model, flags, DECODES)
        draw = random.Random(3)
        prompts = [draw.choices(range(256), k=length) for length in LENGTHS]
        reference = load_reference(model).cuda()
        expected = [reference_greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]
        yield Servers(prefill, dict(zip(DECODES, decodes, strict=True)), prompts, expected)
        prefill.check_clean()


def generate_all(decode: Server, prompts: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: decode.generate(prompt, NEW_TOKENS), prompts))


def check_pools(decode: Server) -> dict[str, int]:
    """All pages are free, in the pools and in the tables on the device; returns the counters."""
    wait_until(decode.idle, 15, "idle")
    decode.check_clean()
    info = decode.settled_info()
    assert info["gauges"]["hot_pages_available"] == info["gauges"]["hot_pages"]
    assert info["gauges"]["hot_buffers"] == 0
    counters: dict[str, int] = info["counters"]
    return counters


def test_tokens_without_hisparse_equal_transformers(servers: Servers) -> None:
    """If this fails, the other tests fail for a reason outside HiSparse."""
    plain = servers.decode("plain")
    assert generate_all(plain, servers.prompts) == servers.expected
    plain.check_clean()


@pytest.mark.parametrize("name", ["1k-graphs", "2k-graphs", "4k-graphs", "2k-eager", "2k-tp2", "4k-pp2"])
def test_tokens_equal_transformers_with_a_buffer_far_smaller_than_the_context(servers: Servers, name: str) -> None:
    """All at once, again from the prefix cache, then one by one."""
    decode = servers.decode(name)
    assert generate_all(decode, servers.prompts) == servers.expected
    assert generate_all(decode, servers.prompts) == servers.expected
    assert [decode.generate(prompt, NEW_TOKENS) for prompt in servers.prompts] == servers.expected
    counters = check_pools(decode)
    for counter in ("hot_hits", "hot_misses", "hot_write_backs", "prefix_tokens_reused", "chunks_verified"):
        assert counters[counter] > 0, counter
    graphs = "CUDA graphs captured" in decode.log.read_text()
    assert graphs == (not name.endswith("eager"))


def test_kv_goes_to_host_memory_over_tcp_and_to_the_gpu_between_gpus(servers: Servers) -> None:
    """The pools of one server use two transports."""
    for name in DECODES:
        servers.decode(name)
    both = {"latent": "tcp", "latent (device)": "nvlink", "indexer": "nvlink"}
    only_gpu = {"latent": "nvlink", "indexer": "nvlink"}

    expected = {name: only_gpu if name == "plain" else both for name in DECODES}

    def routes() -> dict[str, dict[str, str]]:
        by_instance = {peer["instance"]: peer["transports"] for peer in servers.prefill.info()["peers"]}
        return {name: by_instance[servers.decodes[name].info()["instance"]] for name in DECODES}

    def all_known() -> bool:
        """A server is paired before its routes are probed; /server_info shows them with the next report."""
        found = routes()
        return all(len(found[name]) == len(expected[name]) for name in DECODES)

    with contextlib.suppress(AssertionError):  # the comparison names the server that lacks a route
        wait_until(all_known, 15, "the routes are known")
    assert routes() == expected


def test_rows_go_to_the_gpu_and_then_to_host_memory(servers: Servers) -> None:
    """Short prompts go to the hot pool. A continuation of such a prompt reuses its rows from host memory, up to the
    middle of a page.
    """
    decode = servers.decode("2k-graphs")
    before = decode.count("path_bytes_device")
    for prompt, expected in zip(servers.prompts[1:4], servers.expected[1:4], strict=True):
        result = decode.post(prompt, NEW_TOKENS).raise_for_status().json()
        assert result["output_ids"] == expected
        assert result["meta_info"]["kv_path"] == "device", len(prompt)
        again = decode.post([*prompt, *expected[:5]], NEW_TOKENS - 5).raise_for_status().json()
        assert again["output_ids"] == expected[5:]
    assert decode.count("path_bytes_device") > before
    check_pools(decode)


def test_requests_are_fully_resident_while_memory_is_free(servers: Servers) -> None:
    """The hot pool has six buffers; all other hot rows are in lent key pages."""
    decode = servers.decode("lending")
    assert generate_all(decode, servers.prompts) == servers.expected
    counters = check_pools(decode)
    assert counters["hot_misses"] == 0
    assert counters["hot_write_backs"] > 0


def test_request_continues_evicting_when_its_borrowed_pages_are_reclaimed(servers: Servers) -> None:
    """Keys of other requests are written to the pages where its rows were."""
    decode = servers.decode("pressed")
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(decode.generate, servers.prompts[0], LONG_TOKENS, timeout_s=LONG_S)
        wait_until(lambda: decode.info()["gauges"]["hot_pages_borrowed"] > 0 or long.done(), 30, "pages are lent")
        assert not long.done(), long.result()
        assert generate_all(decode, servers.prompts) == servers.expected
        assert long.result(LONG_S)[:NEW_TOKENS] == servers.expected[0]
    counters = check_pools(decode)
    assert counters["hot_misses"] > 0
    assert counters["retractions"] == 0


def test_requests_queue_and_retract_without_failing_when_buffers_and_pages_are_scarce(servers: Servers) -> None:
    """Two hot buffers and host pages for little more than the longest prompt, for three of each prompt."""
    decode = servers.decode("short")
    with ThreadPoolExecutor(32) as pool:
        answers = [
            (number, pool.submit(decode.generate, servers.prompts[number], NEW_TOKENS, priority=number % 3))
            for _ in range(3)
            for number in range(len(LENGTHS))
        ]
        for number, answer in answers:
            assert answer.result(90) == servers.expected[number], f"prompt {number}"
    assert decode.count("retractions") > 0
    check_pools(decode)


def test_sixteen_bit_models_with_experts_give_the_same_tokens_with_and_without_hisparse(tmp_path: Path) -> None:
    """One request at a time uses the same kernels on the same rows and keys: in 16 bits, and both in fp8."""
    draw = random.Random(5)
    prompts = [draw.choices(range(VOCAB_SIZE), k=length) for length in (40, 500)]
    model = make_dsa_checkpoint(
        tmp_path / "model", "deepseek_v32", index_topk=TOPK, max_position_embeddings=1024, dtype=torch.bfloat16
    )

    def decodes(key_bytes: int) -> dict[str, tuple[str, ...]]:
        return {
            "plain": ("--kv-tokens", "2048"),
            "hisparse": (
                "--enable-hisparse",
                *("--hot-rows", str(TOPK), "--kv-tokens", "560", "--max-running-requests", "2"),  # few pages to lend
                *("--kv-memory-gib", str((560 * 4 * key_bytes + 6 * PAGE * 4 * 64 * 2) / (1 << 30))),
                *("--host-memory-gib", "0.1"),
            ),
        }

    with cluster(tmp_path) as started:
        flags = ("--device", "cuda", "--dtype", "bfloat16")
        formats = (("auto", "model", 64), ("fp8_e4m3", "fp8_e4m3", 36))
        pairs = [
            start(started, model, (*flags, "--kv-dtype", kv, "--index-dtype", index), decodes(key_bytes))
            for kv, index, key_bytes in formats
        ]
        for prefill, *both in pairs:
            plain, hot = (decode.wait_ready(peers=1) for decode in both)
            for prompt in prompts:
                assert hot.generate(prompt, NEW_TOKENS) == plain.generate(prompt, NEW_TOKENS)
            assert check_pools(hot)["hot_misses"] > 0
            assert "CUDA graphs captured" in hot.log.read_text()
            for server in (prefill, plain):
                server.check_clean()
