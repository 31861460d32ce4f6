"""The embedded model through a pair, as `make demo` starts it, against transformers."""

from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.models.loading.catalog import locate_model
from pdserve.server.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoints import is_reference_greedy, load_smollm2_reference
from tests.cluster.servers import HTTP, Server, body, cluster

QUESTIONS = ("What is the capital of France?", "Name three primary colors.", "Write a haiku about the sea.")
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with cluster(tmp_path_factory.mktemp("smollm2")) as started:
        pool = ("--kv-tokens", "2048")
        prefill, decode = started.pair("smollm2", ("--chunk-size", "32", *pool), pool)
        yield decode
        prefill.check_clean()
        decode.check_clean()
        assert (decode.stop(), prefill.stop()) == (0, 0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(locate_model("smollm2"))


@pytest.fixture(scope="module")
def reference() -> Any:
    return load_smollm2_reference()


def test_greedy_tokens_equal_transformers(decode: Server, tokenizer: Tokenizer, reference: Any) -> None:
    prompts = [
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": question}]), add_special_tokens=False)
        for question in QUESTIONS
    ]
    response = HTTP.post(f"{decode.url}/generate", json=body(prompts, NEW_TOKENS), timeout=120).raise_for_status()
    outputs = [result["output_ids"] for result in response.json()]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NEW_TOKENS
        assert is_reference_greedy(reference, prompt, output)
    assert decode.generate(prompts[-1], NEW_TOKENS) == outputs[-1]


def test_chat_ends_at_the_end_of_the_turn(decode: Server) -> None:
    request = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "temperature": 0, "max_tokens": 40}
    answer = HTTP.post(f"{decode.url}/v1/chat/completions", json=request, timeout=60).raise_for_status().json()
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert answer["choices"][0]["finish_reason"] == "stop"
