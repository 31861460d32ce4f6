"""The embedded model against transformers with the same dequantised weights, and its answer to a question."""

from typing import Any

import pytest
import torch

from pdserve.models.decoders.dense import Decoder
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import ModelSource, locate_model
from pdserve.models.runner import ModelRunner
from pdserve.server.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoints import is_reference_greedy, load_smollm2_reference, reference_logits


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return locate_model("smollm2")


@pytest.fixture(scope="module", params=[True, False], ids=["blocks", "float32"])
def runner(source: ModelSource, request: pytest.FixtureRequest) -> ModelRunner:
    """With weights in the blocks of the file, as servers have them, and expanded."""
    return ModelRunner.load(source, device=torch.device("cpu"), dtype=torch.float32, keep_blocks=request.param)


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> Tokenizer:
    return load_tokenizer(source)


@pytest.fixture(scope="module")
def reference() -> Any:
    return load_smollm2_reference()


def greedy(runner: ModelRunner, prompt_ids: list[int], new_tokens: int, chunk: int = 16) -> list[int]:
    cache = runner.make_cache(16, 16)
    pages = list(range(15, -1, -1))
    for start in range(0, len(prompt_ids), chunk):
        logits = runner.forward(cache, [SequenceSlice(prompt_ids[start : start + chunk], start, pages)])
    assert logits is not None
    out = [int(logits[0].argmax())]
    while len(out) < new_tokens:
        logits = runner.forward(cache, [SequenceSlice(out[-1:], len(prompt_ids) + len(out) - 1, pages)])
        assert logits is not None
        out.append(int(logits[0].argmax()))
    return out


def test_greedy_tokens_and_logits_equal_transformers(runner: ModelRunner, tokenizer: Tokenizer, reference: Any) -> None:
    prompt_ids = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "Name three primary colors."}]))
    assert is_reference_greedy(reference, prompt_ids, greedy(runner, prompt_ids, 20))
    logits = runner.forward(runner.make_cache(4, 16), [SequenceSlice(prompt_ids, 0, range(4))])
    assert logits is not None
    expected = reference_logits(reference, prompt_ids)[-1]
    stack = runner._decoder._stack if isinstance(runner._decoder, Decoder) else None
    tolerance = 3e-4 if stack is None else 2e-4 * expected.abs().max().item()  # it rounds activations to 16 bits
    torch.testing.assert_close(logits[0], expected, rtol=0, atol=tolerance)


def test_embedded_model_answers_a_question_and_stops(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    out = greedy(runner, tokenizer.encode(tokenizer.render_chat(messages)), 8)
    assert tokenizer.decode(out, skip_special_tokens=False) == "The capital of France is Paris.<|im_end|>"
    assert out[-1] in runner.config.eos_token_ids
