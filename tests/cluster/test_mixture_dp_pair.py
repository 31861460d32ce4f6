"""Data-parallel attention of mixtures with KV heads on real pairs: the heads that tensor-parallel prefill ranks divide
are whole on every decode rank, so each chunk is staged into the ring of the one rank that has the request. Tokens equal
transformers'.
"""

import itertools
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.checkpoints import VOCAB_SIZE, GreedyTokens, TinyArchitecture, load_reference, make_checkpoint
from tests.cluster.servers import HTTP, Cluster, Server, wait_until

NEW_TOKENS = 8
LENGTHS = (1, 17, 48, 90, 131, 200)
PREFILL_PAGE, DECODE_PAGE = 16, 8
FULL = os.environ.get("PDSERVE_MATRIX") == "full"
"""`make test-matrix`: every combination; otherwise each family and each layout of a side once."""
FAMILIES: tuple[TinyArchitecture, ...] = ("gpt_oss", "qwen3_moe", "mixtral")
TP2, DP2, DP4 = ("--tp", "2"), ("--tp", "2", "--dp-attention"), ("--tp", "4", "--dp-attention")
DP2_PP2 = (*DP2, "--pp", "2")
PREFILLS = {
    "tp4": ("--config", "mixture-prefill", "--tp", "4"),
    "tp2": TP2,
    "tp2-pp2": (*TP2, "--pp", "2"),
    "dp2": DP2,
    "dp2-pp2": DP2_PP2,
}
DECODES = {"dp4": ("--config", "mixture-decode", "--tp", "4"), "dp2": DP2, "dp2-pp2": DP2_PP2, "tp2": TP2}
"""Four ranks are those of the presets; --tp tells `Server` how many processes to fork."""


class Case(NamedTuple):
    family: TinyArchitecture
    prefill: str
    decode: str


CASES = [
    Case("qwen3_moe", "tp4", "dp4"),
    Case("gpt_oss", "tp2", "dp2"),
    Case("mixtral", "tp2-pp2", "dp2"),
    Case("mixtral", "dp2-pp2", "tp2"),
    Case("qwen3_moe", "tp2", "dp2-pp2"),
    Case("gpt_oss", "dp2", "dp2"),
]
if FULL:
    CASES = [Case(*each) for each in itertools.product(FAMILIES, PREFILLS, DECODES) if each[1:] != ("tp2", "tp2")]


class Model(NamedTuple):
    directory: Path
    prompts: list[list[int]]
    expected: list[GreedyTokens]
    token_bytes: int
    """KV of all layers and heads."""


def make_model(directory: Path, family: TinyArchitecture) -> Model:
    """8 query and 4 KV heads, and experts that four ranks can divide. The second of three layers of qwen3_moe has no
    experts, the first and the third of gpt_oss have windows.
    """
    overrides: dict[str, Any] = {"mlp_only_layers": [1], "moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    path = make_checkpoint(directory, family, num_attention_heads=8, num_key_value_heads=4, head_dim=16, **overrides)
    draw = random.Random(4)
    prompts = [draw.choices(range(VOCAB_SIZE), k=length) for length in LENGTHS]
    reference = load_reference(path)
    expected = [GreedyTokens(reference, prompt, NEW_TOKENS) for prompt in prompts]
    return Model(path, prompts, expected, 3 * 2 * 4 * 16 * 4)


def start(
    servers: Cluster, model: Model, case: Case, *flags: str, common: tuple[str, ...] = ()
) -> tuple[Server, Server]:
    """A pair with these layouts; `flags` are for decode, `common` for both."""
    chunks = ("--page-size", str(PREFILL_PAGE), "--chunk-size", "48", "--kv-tokens", "4096")
    prefill = servers.add("prefill", model.directory, *PREFILLS[case.prefill], *chunks, *common)
    source = ("--prefill", prefill.endpoint, "--page-size", str(DECODE_PAGE))
    decode = servers.add("decode", model.directory, *DECODES[case.decode], *source, *common, *flags)
    prefill.wait_ready()
    return prefill, decode.wait_ready(peers=1)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_tokens_equal_transformers_and_each_request_is_sent_to_one_rank(
    servers: Cluster, tmp_path: Path, case: Case
) -> None:
    model = make_model(tmp_path / "model", case.family)
    prefill, decode = start(servers, model, case, "--kv-tokens", "2048")
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda prompt: decode.generate(prompt, NEW_TOKENS), model.prompts))
    assert found == model.expected
    info, sent = decode.settled_info(), prefill.settled_info()["counters"]
    assert info["counters"]["chunks_verified"] > 0
    # each token's KV is sent once: to one data-parallel rank, or in parts to tensor-parallel ones
    assert info["counters"]["transfer_bytes"] == sum(LENGTHS) * model.token_bytes
    same_heads = case.prefill.startswith("dp") == case.decode.startswith("dp")
    if same_heads:
        assert sent["staged_parts"] == 0
    else:
        assert sent["staged_parts"] == sent["transfer_writes"] > 0
        assert sent["staged_bytes"] == sum(LENGTHS) * model.token_bytes
    if case.decode.startswith("dp"):
        assert all(rank["gauges"]["cached_pages"] > 0 for rank in info["dp_ranks"]), "a rank got no request"
    for server in (prefill, decode):
        gauges = server.settled_info()["gauges"]
        assert gauges.get("staging_ring_bytes_granted", 0) == gauges.get("staging_parts", 0) == 0
        server.check_clean()
    assert decode.stop() == 0


def test_small_rings_and_pools_with_every_kind_of_request(servers: Cluster, tmp_path: Path) -> None:
    """Rings hold a part of a prompt, pools three requests: prompts wait, and requests are retracted. Then samples,
    log probabilities, grammars and cached prefixes.
    """
    model = make_model(tmp_path / "model", "gpt_oss")
    flags = ("--kv-tokens", "480", "--growth-tokens", "8", "--staging-ring-mib", "0.03")
    prefill, decode = start(servers, model, Case("gpt_oss", "tp2", "dp2"), *flags)
    longer = GreedyTokens(load_reference(model.directory), model.prompts[-2], 80)
    with ThreadPoolExecutor(20) as pool:  # the prompt's pages are shared: seven on each rank do not fit, four would
        many = [pool.submit(decode.generate, model.prompts[-2], 80) for _ in range(14)]
        few = [pool.submit(decode.generate, prompt, NEW_TOKENS) for prompt in model.prompts]
        assert [each.result() for each in many] == [longer] * 14
        assert [each.result() for each in few] == model.expected
    counters = decode.settled_info()["counters"]
    assert counters["retractions"] > 0
    assert counters["prefix_tokens_reused"] > 0
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "n": 3}
    request = {"input_ids": model.prompts[3], "sampling_params": sampling}
    answers = HTTP.post(f"{decode.url}/generate", json=request, timeout=60).raise_for_status().json()
    assert [each["output_ids"] for each in answers] == [model.expected[3]] * 3
    scored = decode.post(model.prompts[4], NEW_TOKENS, return_logprob=True, logprob_start_len=0)
    answer = scored.raise_for_status().json()
    assert answer["output_ids"] == model.expected[4]
    assert len(answer["meta_info"]["input_token_logprobs"]) == LENGTHS[4]
    constrained = {"max_new_tokens": 12, "temperature": 0, "regex": "(ab){6}"}
    bodies = [{"input_ids": prompt, "sampling_params": constrained} for prompt in model.prompts[1:5]]
    with ThreadPoolExecutor() as pool:
        texts = pool.map(lambda each: HTTP.post(f"{decode.url}/generate", json=each, timeout=60).json()["text"], bodies)
        assert list(texts) == ["ab" * 6] * 4
    for server in (prefill, decode):
        server.check_clean()
    assert decode.stop() == 0


def test_data_parallel_ranks_compute_prompts_themselves(servers: Cluster, tmp_path: Path) -> None:
    """Local prefill, with four ranks of two layers without and with windows."""
    model = make_model(tmp_path / "model", "qwen3_moe")
    decode = servers.add("decode", model.directory, *DP4, "--local-prefill", "always", "--kv-tokens", "1024")
    decode.wait_ready()
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda prompt: decode.generate(prompt, NEW_TOKENS), model.prompts)) == model.expected
    decode.check_clean()
    assert decode.stop() == 0


def test_request_waits_until_a_rank_has_pages_and_takes_the_first_one(servers: Cluster, tmp_path: Path) -> None:
    """Both ranks are full: one soon has pages again, the other one not before the request has ended."""
    model = make_model(tmp_path / "model", "qwen3_moe")
    flags = ("--kv-tokens", "320", "--growth-tokens", "8", "--no-prefix-cache")
    prefill, decode = start(servers, model, Case("qwen3_moe", "tp2", "dp2"), *flags)

    def loads(name: str) -> list[int]:
        return [rank[name] for rank in decode.info()["dp_ranks"]]

    full = model.prompts[-1]
    with ThreadPoolExecutor(3) as pool:
        long = pool.submit(decode.generate, full, 110)
        wait_until(lambda: sum(loads("requests")) == 1, 30, "the long request has a rank")
        short = pool.submit(decode.generate, full, 60)
        wait_until(lambda: loads("requests") == [1, 1], 30, "each rank has a request")
        assert min(loads("kv_tokens")) >= len(full)
        waiting = pool.submit(decode.generate, full, NEW_TOKENS)
        wait_until(lambda: sum(loads("waiting")) == 1, 30, "the request waits for a rank")
        assert not short.done()
        assert waiting.result() == model.expected[-1]
        assert not long.done(), "the long request has ended too early for this test"
        assert len(short.result()) == 60
        assert len(long.result()) == 110
    assert [rank["requests"] for rank in decode.settled_info()["dp_ranks"]] == [0, 0]
    for server in (prefill, decode):
        server.check_clean()
    assert decode.stop() == 0


def test_requests_of_a_dead_prefill_server_end_and_rings_are_empty(servers: Cluster, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "mixtral")
    flags = ("--kv-tokens", "2048", "--staging-ring-mib", "0.03", "--quarantine-s", "1")
    prefill, decode = start(servers, model, Case("mixtral", "tp4", "dp2"), *flags)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(decode.post, model.prompts[-1], 2) for _ in range(8)]
        wait_until(lambda: prefill.count("staged_parts") > 0, 30, "a part is staged")
        prefill.kill()
        assert {each.result().status_code for each in waiting} <= {200, 503}
    wait_until(decode.idle, 20, "everything is free")
    gauges = decode.settled_info()["gauges"]
    assert gauges["staging_ring_bytes_granted"] == 0
    prefill.start().wait_ready()
    decode.wait_ready(peers=1)
    assert decode.generate(model.prompts[3], NEW_TOKENS) == model.expected[3]
    assert decode.stop() == 0
