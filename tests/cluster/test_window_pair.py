"""Real pairs with a model whose layers all have a sliding window: pages before the window are freed and not sent."""

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.checkpoints import VOCAB_SIZE, GreedyTokens, load_reference, make_checkpoint
from tests.cluster.servers import HTTP, Server, body, cluster

WINDOW = 32
NEW_TOKENS, MORE_TOKENS = 110, 8
LENGTHS = (1, 63, 129, 330)
TOKEN_BYTES = 3 * 2 * 2 * 16 * 4
"""Layers * (keys and values) * heads * dimensions * bytes."""
DECODE_TOKENS = 240
"""Tokens of the decode pool. The longest sequence has more; all together fit without the pages before their windows."""


class Layout(NamedTuple):
    """Flags of both servers, and the page size of decode."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    page: int


LAYOUTS = {
    "one rank": Layout(("--page-size", "16"), ("--page-size", "16"), 16),
    "tp2 to pp2": Layout(("--page-size", "16", "--tp", "2"), ("--page-size", "8", "--pp", "2"), 8),
    "pp2 to tp2": Layout(("--page-size", "12", "--pp", "2"), ("--page-size", "16", "--tp", "2"), 16),
    "local": Layout((), ("--page-size", "8", "--local-prefill", "always"), 8),
}
FULL = os.environ.get("PDSERVE_MATRIX") == "full"
"""`make test-matrix`: every layout; otherwise one that covers ranks, staging and different page sizes."""


class Pair(NamedTuple):
    prefill: Server | None
    decode: Server
    page: int
    prompts: list[list[int]]
    expected: list[GreedyTokens]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], list[GreedyTokens]]:
    directory = make_checkpoint(tmp_path_factory.mktemp("window-model"), "mistral", sliding_window=WINDOW)
    draw = random.Random(5)
    prompts = [draw.choices(range(VOCAB_SIZE), k=length) for length in LENGTHS]
    reference = load_reference(directory)
    return directory, prompts, [GreedyTokens(reference, prompt, NEW_TOKENS + MORE_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module", params=LAYOUTS if FULL else ["tp2 to pp2"])
def pair(
    request: pytest.FixtureRequest,
    model: tuple[Path, list[list[int]], list[GreedyTokens]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    directory, prompts, expected = model
    layout = LAYOUTS[request.param]
    with cluster(tmp_path_factory.mktemp("window-logs")) as servers:
        prefill: Server | None = None
        if layout.prefill:
            prefill, decode = servers.pair(
                directory,
                ("--kv-tokens", "480", "--chunk-size", "48", *layout.prefill),
                ("--kv-tokens", str(DECODE_TOKENS), *layout.decode),
            )
        else:  # a prompt that decode computes has to fit into its pool
            tokens = str(2 * DECODE_TOKENS)
            decode = servers.add("decode", directory, "--kv-tokens", tokens, *layout.decode).wait_ready()
        yield Pair(prefill, decode, layout.page, prompts, expected)
        for server in (prefill, decode):
            if server is not None:
                server.check_clean()


def test_outputs_longer_than_the_window_and_the_pool_equal_transformers(pair: Pair) -> None:
    """All at once; the sequences together have several times the tokens of the decode pool."""
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        found = list(pool.map(lambda prompt: pair.decode.generate(prompt, NEW_TOKENS), pair.prompts))
    assert found == [expected[:NEW_TOKENS] for expected in pair.expected]
    assert pair.decode.info()["pool"]["max_total_tokens"] == 512


def test_only_tokens_that_the_first_step_sees_are_sent(pair: Pair) -> None:
    draw = random.Random(6)
    before = pair.decode.count("transfer_bytes")
    assert len(pair.decode.generate(draw.choices(range(VOCAB_SIZE), k=336), 2)) == 2  # whole pages of both servers
    sent = 336 - (336 - WINDOW + 1) // pair.page * pair.page if pair.prefill is not None else 0
    assert pair.decode.count("transfer_bytes") - before == sent * TOKEN_BYTES


def test_next_turn_of_a_conversation_reuses_the_cached_prefix(pair: Pair) -> None:
    prompt, answer = pair.prompts[2], pair.expected[2][:NEW_TOKENS]
    assert pair.decode.generate(prompt, NEW_TOKENS) == answer
    before = pair.decode.count("prefix_tokens_reused")
    assert pair.decode.generate([*prompt, *answer], MORE_TOKENS) == pair.expected[2][NEW_TOKENS:]
    cached = (len(prompt) + NEW_TOKENS - 1) // pair.page * pair.page
    assert pair.decode.count("prefix_tokens_reused") - before >= cached


def test_samples_of_a_prompt_longer_than_the_window_equal_transformers(pair: Pair) -> None:
    request = body(pair.prompts[1], 60)
    request["sampling_params"]["n"] = 2
    response = HTTP.post(f"{pair.decode.url}/generate", json=request, timeout=60).raise_for_status().json()
    assert [sample["output_ids"] for sample in response] == [pair.expected[1][:60]] * 2
