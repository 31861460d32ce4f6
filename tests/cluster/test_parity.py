"""Tokens of a real pair (processes, Mooncake, sockets) equal those of transformers."""

import itertools
import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.checkpoints import VOCAB_SIZE, GreedyTokens, load_reference, make_checkpoint
from tests.cluster.servers import HTTP, Server, body, cluster

NEW_TOKENS = 12
PAGE, CHUNK = 16, 48
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)


class Case(NamedTuple):
    """A checkpoint and the page size of decode."""

    architecture: Any
    config: dict[str, Any]
    decode_page: int


CASES = {
    "llama-gqa": Case("llama", {}, decode_page=16),
    "llama-tied-llama3-rope": Case(
        "llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        decode_page=64,
    ),
    "qwen2-bias-window": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}, decode_page=5
    ),
    "qwen3-qk-norm": Case("qwen3", {}, decode_page=1),
    "mistral-window": Case("mistral", {"sliding_window": 40}, decode_page=8),
    "gemma3": Case("gemma3_text", {}, decode_page=8),
    "gpt-oss": Case("gpt_oss", {}, decode_page=8),
    "olmo2": Case("olmo2", {}, decode_page=8),
    "mixtral": Case("mixtral", {}, decode_page=16),
    "qwen3-moe": Case("qwen3_moe", {"norm_topk_prob": True}, decode_page=16),
}
FULL = os.environ.get("PDSERVE_MATRIX") == "full"
"""`make test-matrix`: every model; otherwise those that no other test in this folder serves."""


class Pair(NamedTuple):
    prefill: Server
    decode: Server
    prompts: list[list[int]]
    expected: list[GreedyTokens]


@pytest.fixture(
    scope="module",
    params=list(CASES) if FULL else ["llama-tied-llama3-rope", "qwen2-bias-window", "qwen3-moe", "olmo2"],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    case = CASES[request.param]
    model = make_checkpoint(tmp_path_factory.mktemp("model"), case.architecture, **case.config)
    with cluster(tmp_path_factory.mktemp("logs")) as started:
        prefill, decode = started.pair(
            model,
            ("--page-size", str(PAGE), "--chunk-size", str(CHUNK), "--kv-tokens", "2048"),
            ("--page-size", str(case.decode_page), "--kv-tokens", "2048"),
        )
        reference = load_reference(model)
        draw = random.Random(7)
        prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
        yield Pair(prefill, decode, prompts, [GreedyTokens(reference, prompt, NEW_TOKENS) for prompt in prompts])
        prefill.check_clean()
        decode.check_clean()
        counters = decode.info()["counters"]
        assert counters["chunks_verified"] == counters["chunks"] > 0


def test_single_requests_equal_transformers(pair: Pair) -> None:
    got = [pair.decode.generate(prompt, NEW_TOKENS) for prompt in pair.prompts]
    assert got == pair.expected


def test_batch_equals_transformers(pair: Pair) -> None:
    response = HTTP.post(f"{pair.decode.url}/generate", json=body(pair.prompts, NEW_TOKENS), timeout=60)
    assert [result["output_ids"] for result in response.raise_for_status().json()] == pair.expected


def test_concurrent_streams_equal_transformers_while_the_batch_changes(pair: Pair) -> None:
    """Different prompt and output lengths at once: sequences join and leave the batch while others run."""
    budgets = [NEW_TOKENS - index % 5 for index in range(len(pair.prompts))]
    with ThreadPoolExecutor(len(pair.prompts)) as pool:
        results = list(pool.map(lambda args: stream(pair.decode, *args), zip(pair.prompts, budgets, strict=True)))
    for events, expected, budget in zip(results, pair.expected, budgets, strict=True):
        assert events[-1]["output_ids"] == expected[:budget]
        assert events[-1]["meta_info"]["completion_tokens"] == budget
        assert all(later["text"].startswith(earlier["text"]) for earlier, later in itertools.pairwise(events))


def stream(server: Server, prompt: list[int], new_tokens: int) -> list[dict[str, Any]]:
    """All events of a streamed request. The stream must end with [DONE]."""
    with HTTP.stream(
        "POST", f"{server.url}/generate", json=body(prompt, new_tokens, stream=True), timeout=60
    ) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_timeline_adds_up_to_the_latency(pair: Pair) -> None:
    """The leader measures the timeline and the frontend the latency, which includes the messages between the two."""
    elsewhere_s = []
    for _ in range(5):
        info = pair.decode.post(pair.prompts[-1], NEW_TOKENS).json()["meta_info"]
        assert info["prompt_tokens"] == LENGTHS[-1]
        assert info["timeline"]["prefill"] > 0
        assert info["timeline"]["decode"] > 0
        elsewhere_s.append(info["e2e_latency"] - sum(info["timeline"].values()))
    assert 0 <= min(elsewhere_s) < 0.05


def test_stop_token_ends_a_request(pair: Pair) -> None:
    """The token that ends a request is part of its output and named in finish_reason."""
    prompt, expected = pair.prompts[3], pair.expected[3]
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "stop_token_ids": [expected[4]], "ignore_eos": True}
    response = HTTP.post(
        f"{pair.decode.url}/generate", json={"input_ids": prompt, "sampling_params": sampling}, timeout=60
    ).json()
    cut = expected.index(expected[4]) + 1
    assert response["output_ids"] == expected[:cut]
    assert response["meta_info"]["finish_reason"] == {"type": "stop", "matched": expected[4]}


def test_single_token_needs_no_decode_step(pair: Pair) -> None:
    """The first token comes from prefill."""
    before = pair.decode.count("decode_steps")
    assert pair.decode.generate(pair.prompts[0], 1) == pair.expected[0][:1]
    assert pair.decode.count("decode_steps") == before


def test_seed_gives_the_same_tokens_in_any_batch(pair: Pair) -> None:
    sampling = {"max_new_tokens": 10, "temperature": 1.0, "top_p": 0.95, "seed": 1234, "ignore_eos": True}
    request = {"input_ids": pair.prompts[2], "sampling_params": sampling}
    alone = HTTP.post(f"{pair.decode.url}/generate", json=request, timeout=60).json()["output_ids"]
    crowd = {"input_ids": [*pair.prompts, pair.prompts[2]], "sampling_params": sampling}
    crowded = HTTP.post(f"{pair.decode.url}/generate", json=crowd, timeout=60).json()[-1]["output_ids"]
    assert crowded == alone


def test_logs_have_only_lines_of_pdserve(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        for line in Path(server.log).read_text().splitlines():
            assert f" {server.role}: " in line, f"not a line of pdserve: {line!r}"
