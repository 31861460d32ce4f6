"""Data-parallel attention with expert parallelism on real pairs: tokens equal transformers', requests are spread over
the ranks, and a full rank does not delay the others.
"""

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.checkpoints import GreedyTokens, is_reference_greedy, load_reference, make_dsa_checkpoint
from tests.cluster.servers import HTTP, Cluster, Server, cluster, wait_until

TOPK, PAGE = 16, 8
LENGTHS = (1, 9, TOPK + 1, 49, 120, 150)
NEW_TOKENS = 8
DP2 = ("--tp", "2", "--dp-attention")
ROW_BYTES, KEY_BYTES, LAYERS = 64 * 4, 32 * 4, 2  # a dense layer, and one with experts
"""Bytes per token and layer: 48 + 16 floats of a latent row, 32 floats of an indexer key."""
HISPARSE_TOKENS, HOT_PAGES = 320, 10
"""KV of a rank in host memory, and hot pages beside its index: too few for the longest prompt to be fully resident."""
HISPARSE_BYTES = (HOT_PAGES * PAGE + 0.5) * LAYERS * ROW_BYTES + HISPARSE_TOKENS * LAYERS * KEY_BYTES
HISPARSE = (
    "--enable-hisparse",
    *("--hot-rows", "32", "--max-running-requests", "2", "--host-memory-gib", "0.2"),
    *("--kv-memory-gib", str(HISPARSE_BYTES / (1 << 30))),
)


class Pairs(NamedTuple):
    """Prefill servers, prompts, and the tokens of transformers."""

    servers: Cluster
    model: Path
    plain: Server
    """With two tensor-parallel ranks."""
    parallel: Server
    """With data-parallel attention."""
    prompts: list[list[int]]
    expected: list[GreedyTokens]
    reference: Any

    def decode(self, *flags: str) -> Server:
        """Start a decode server that is paired with both prefill servers."""
        endpoints = ",".join((self.plain.endpoint, self.parallel.endpoint))
        common = ("--prefill", endpoints, "--page-size", str(PAGE))
        return self.servers.add("decode", self.model, *common, *flags).wait_ready(peers=2)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    model = make_dsa_checkpoint(
        tmp_path_factory.mktemp("model"), "deepseek_v32", index_topk=TOPK, num_hidden_layers=LAYERS
    )
    flags = ("--page-size", "16", "--chunk-size", "48", "--kv-tokens", "4096")
    with cluster(tmp_path_factory.mktemp("logs")) as servers:
        plain, parallel = (
            servers.add("prefill", model, "--tp", "2", *flags),
            servers.add("prefill", model, *DP2, *flags),
        )
        draw = random.Random(7)
        prompts = [draw.choices(range(256), k=length) for length in LENGTHS]
        reference = load_reference(model)
        expected = [GreedyTokens(reference, prompt, NEW_TOKENS) for prompt in prompts]
        for server in (plain, parallel):
            server.wait_ready()
        yield Pairs(servers, model, plain, parallel, prompts, expected, reference)
        for server in (plain, parallel):
            server.check_clean()
        assert all(rank["gauges"]["cached_pages"] > 0 for rank in parallel.info()["dp_ranks"]), "a rank got no prompt"


def check_both_sources(pairs: Pairs, decode: Server) -> None:
    """All prompts at once, from each prefill server."""
    for source in (pairs.plain, pairs.parallel):
        with ThreadPoolExecutor() as pool:
            found = pool.map(
                lambda prompt, to=source.bootstrap: decode.generate(prompt, NEW_TOKENS, **to), pairs.prompts
            )
            assert list(found) == pairs.expected
    assert decode.count("chunks_verified") > 0


@pytest.mark.parametrize("hisparse", [False, True], ids=["plain", "hisparse"])
def test_tokens_equal_transformers_from_plain_and_data_parallel_prefill(pairs: Pairs, hisparse: bool) -> None:
    tokens = HISPARSE_TOKENS if hisparse else 1024
    decode = pairs.decode(*DP2, "--kv-tokens", str(tokens), "--no-prefix-cache", *(HISPARSE if hisparse else ()))
    check_both_sources(pairs, decode)
    info = decode.settled_info()
    assert info["dp_size"] == 2
    assert [rank["rank"] for rank in info["ranks"]] == [0, 1]
    assert info["gauges"]["kv_pages"] == 2 * tokens // PAGE, "pages of the pools of both ranks"
    assert (info["counters"]["hot_misses"] > 0) == hisparse
    assert [load["dp_rank"] for load in HTTP.get(f"{decode.url}/get_load", timeout=5).json()] == [0, 1]
    metric = f'pdserve_dp_rank_kv_pages{{dp_rank="1"}} {tokens / PAGE}'
    assert metric in HTTP.get(f"{decode.url}/metrics", timeout=5).text
    assert info["counters"]["transfer_bytes"] == 2 * sum(LENGTHS) * LAYERS * (ROW_BYTES + KEY_BYTES), (
        "KV was sent to more than one rank"
    )
    decode.check_clean()
    assert decode.stop() == 0


def test_tensor_parallel_decode_takes_prompts_of_data_parallel_prefill(pairs: Pairs) -> None:
    """The rank that has computed a prompt writes it to both ranks."""
    decode = pairs.decode("--tp", "2", "--kv-tokens", "2048", "--no-prefix-cache")
    check_both_sources(pairs, decode)
    assert decode.count("transfer_bytes") == 2 * 2 * sum(LENGTHS) * LAYERS * (ROW_BYTES + KEY_BYTES)
    decode.check_clean()
    assert decode.stop() == 0


def test_tokens_equal_transformers_with_pipeline_stages_of_data_parallel_ranks(pairs: Pairs) -> None:
    """Two stages of two ranks: a data-parallel rank is a decode server of two stages for its peers."""
    decode = pairs.decode(*DP2, "--pp", "2", "--kv-tokens", "1024")
    check_both_sources(pairs, decode)
    assert len(decode.info()["ranks"]) == 4
    decode.check_clean()
    assert decode.stop() == 0


def test_full_rank_does_not_delay_the_other(pairs: Pairs) -> None:
    """One request fills its rank. Those that follow run on the other rank, one after the other, and end before it."""
    decode = pairs.decode(*DP2, "--kv-tokens", "480", "--growth-tokens", "8", "--no-prefix-cache")
    long_prompt = random.Random(1).choices(range(256), k=300)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(decode.generate, long_prompt, 120)
        wait_until(lambda: decode.info()["states"]["running"] == 1, 30, "the long request runs")
        for prompt, expected in zip(pairs.prompts[::2], pairs.expected[::2], strict=True):
            assert decode.generate(prompt, NEW_TOKENS) == expected
        assert not long.done(), "the long request has ended too early for this test"
        held = sorted(rank["gauges"]["kv_pages_held"] for rank in decode.settled_info()["dp_ranks"])
        assert held[0] == 0
        assert held[1] > 300 / PAGE
        assert len(long.result()) == 120
        assert is_reference_greedy(pairs.reference, long_prompt, long.result())
    decode.check_clean()
    assert decode.stop() == 0


def test_more_requests_than_fit_are_retracted_and_keep_their_tokens(pairs: Pairs) -> None:
    decode = pairs.decode(*DP2, "--kv-tokens", "320", "--growth-tokens", "8", "--no-prefix-cache")
    prompt = pairs.prompts[-2]
    with ThreadPoolExecutor(6) as pool:
        first, *others = pool.map(lambda _: decode.generate(prompt, 48), range(6))
    assert len(first) == 48
    assert is_reference_greedy(pairs.reference, prompt, first)
    assert others == [first] * 5
    assert decode.count("retractions") > 0
    decode.check_clean()
    assert decode.stop() == 0


def test_data_parallel_ranks_compute_prompts_with_samples_and_logprobs(pairs: Pairs) -> None:
    """A data-parallel decode server computes prompts itself (local prefill)."""
    decode = pairs.servers.add("decode", pairs.model, *DP2, "--local-prefill", "always", "--kv-tokens", "2048")
    decode.wait_ready()
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda prompt: decode.generate(prompt, NEW_TOKENS), pairs.prompts)
        scored = pool.submit(decode.post, pairs.prompts[4], NEW_TOKENS, return_logprob=True, logprob_start_len=0)
        assert list(found) == pairs.expected
        answer = scored.result().raise_for_status().json()
    assert answer["output_ids"] == pairs.expected[4]
    assert len(answer["meta_info"]["input_token_logprobs"]) == LENGTHS[4]
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "n": 2}
    request = {"input_ids": pairs.prompts[5], "sampling_params": sampling}
    answers = HTTP.post(f"{decode.url}/generate", json=request, timeout=60).raise_for_status().json()
    assert [each["output_ids"] for each in answers] == [pairs.expected[5]] * 2
    decode.check_clean()
    assert decode.stop() == 0


def test_lost_rank_ends_the_server(pairs: Pairs) -> None:
    decode = pairs.decode(*DP2, "--kv-tokens", "1024")
    leader = decode.leader_pid()
    _, rank = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(decode.post, prompt, 400) for prompt in pairs.prompts[:2]]
        wait_until(lambda: decode.info()["states"]["running"] == 2, 30, "a request runs on each rank")
        os.kill(int(rank), signal.SIGKILL)
        for request in running:
            assert request.result().status_code == 503
    assert decode.process is not None
    assert decode.process.wait(20) == 1
