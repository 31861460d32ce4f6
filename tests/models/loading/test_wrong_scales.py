"""The limit that GPU tests set for tokens of quantised models (limit_for) detects scales in the wrong place.

Products are computed as on a GPU, by the references of its kernels: weights stay in fp8 or 4 bits, and the activations
of many tokens are quantised.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.runner import ModelRunner
from tests.checkpoints import VOCAB_SIZE
from tests.family_checkpoints import FORMATS, limit_for, shift_scales, token_gaps, write_checkpoint

CPU = torch.device("cpu")
PAGE, PAGES = 16, tuple(range(8))
NEW_TOKENS = 4
FAMILY_OF = {
    "fp8-blocks": "qwen3",
    "fp8-rows": "qwen3",
    "fp8-matrices": "qwen2",
    "fp8-fbgemm": "llama",
    "awq": "qwen2",
    "gptq": "llama",
    "w4a16": "qwen3",
    "w4a16-asymmetric": "qwen3-moe",
    "int4-experts": "kimi-k2",
    "mxfp4": "gpt-oss",
    "nvfp4": "llama",
    "nvfp4-packed": "qwen3-moe",
}


@pytest.fixture(autouse=True)
def _weights_stay_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.models.weights.fp8.supports_fp8", lambda _: True)
    for name in ("packed4", "mxfp4"):
        monkeypatch.setattr(f"pdserve.models.weights.{name}.supports_int4", lambda _: True)
    monkeypatch.setattr("pdserve.models.weights.nvfp4.supports_nvfp4", lambda _: True)


@pytest.mark.slow
@pytest.mark.parametrize("format_name", FORMATS)
def test_shifted_scales_exceed_the_limit(format_name: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, FAMILY_OF[format_name], format_name, "bfloat16")
    reference, limit = checkpoint.load_reference(), limit_for(format_name, "bfloat16")
    assert largest_gap(checkpoint.directory, reference) <= limit
    assert shift_scales(checkpoint.directory / "model.safetensors") > 0
    assert largest_gap(checkpoint.directory, reference) > limit


def largest_gap(directory: Path, reference: Any) -> float:
    """The largest gap of tokens after two prompts: a short one, whose activations are exact, and a long one."""
    runner = ModelRunner.load(locate_model(str(directory)), device=CPU, dtype=torch.bfloat16)
    draw = random.Random(3)
    gaps = []
    for length in (20, 100):
        prompt, output = draw.choices(range(VOCAB_SIZE), k=length), list[int]()
        cache = runner.make_cache(len(PAGES), PAGE)
        step = SequenceSlice(tuple(prompt), 0, PAGES)
        for _ in range(NEW_TOKENS):
            logits = runner.forward(cache, [step])
            assert logits is not None
            output.append(int(logits[0].argmax()))
            step = SequenceSlice((output[-1],), length + len(output) - 1, PAGES)
        gaps += token_gaps(reference, prompt, output)
    return max(gaps)
