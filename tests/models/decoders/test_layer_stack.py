"""All layers of a decode step in one call, against one call per operation; which decoders and steps support it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from pdserve.kernels.backends.dispatch import has_interleaved_kernels
from pdserve.kernels.layer_stack.layer_stack import LayerStack
from pdserve.models.decoders.dense import Decoder
from pdserve.models.decoders.layer_stack import make_layer_stack
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.runner import ModelRunner
from tests.checkpoints import make_checkpoint
from tests.gguf_checkpoints import convert
from tests.kernels.numba_kernels import needs_numba

CPU = torch.device("cpu")
pytestmark = [
    needs_numba,
    pytest.mark.skipif(not has_interleaved_kernels(), reason="needs AVX2, AVX-512 or NEON with dot products"),
]


def load(folder: Path, architecture: Any = "llama", kind: str = "Q4_1", **fields: Any) -> ModelRunner:
    make_checkpoint(folder / "hf", architecture, **fields)
    convert(folder / "hf", folder / "model.gguf", gguf.GGMLQuantizationType[kind])
    source = locate_model(str(folder / "model.gguf"))
    return ModelRunner.load(source, device=CPU, dtype=torch.float32, keep_blocks=True)


def decoder_of(runner: ModelRunner) -> Decoder:
    assert isinstance(runner._decoder, Decoder)
    return runner._decoder


def step(runner: ModelRunner, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a decode step after prompts of these lengths, and the KV pool."""
    cache = runner.make_cache(4 * len(lengths), 16)
    pages = [range(4 * at, 4 * at + 4)[::-1] for at in range(len(lengths))]
    prompts = [
        SequenceSlice([(7 * at + 3 * i) % 300 for i in range(size)], 0, own)
        for at, (size, own) in enumerate(zip(lengths, pages, strict=True))
        if size
    ]
    if prompts:
        runner.forward(cache, prompts)
    tokens = [SequenceSlice([17 + at], size, own) for at, (size, own) in enumerate(zip(lengths, pages, strict=True))]
    logits = runner.forward(cache, tokens)
    assert logits is not None
    return logits, cache.pools[0].data


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("lengths", [[0], [2], [50], [50, 0, 3, 16, 31], [20] * 32], ids=str)
@pytest.mark.parametrize(
    ("architecture", "fields"),
    [("llama", {"attention_bias": True}), ("qwen2", {}), ("qwen3", {})],
    ids=["llama-biases", "qwen2", "qwen3"],
)
def test_logits_and_kv_equal_those_of_single_operations(
    architecture: str,
    fields: dict[str, Any],
    lengths: list[int],
    threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = load(tmp_path, architecture, **fields)
    calls, run = [], LayerStack.run

    def run_and_count(stack: LayerStack, hidden: torch.Tensor, *arguments: Any) -> torch.Tensor:
        calls.append(len(hidden))
        return run(stack, hidden, *arguments)

    monkeypatch.setattr(LayerStack, "run", run_and_count)
    logits, kv = step(runner, lengths)
    assert calls == [len(lengths)]  # not the prompts
    decoder_of(runner)._stack = None
    expected, expected_kv = step(runner, lengths)
    assert calls == [len(lengths)]
    # Both round x to 16 bits. With several threads attention sums in another order: x may round to the next integer.
    tolerance = 1e-6 if threads == 1 else 1e-4
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance * expected.abs().max().item())
    torch.testing.assert_close(kv, expected_kv, rtol=0, atol=tolerance * expected_kv.abs().max().item())


def test_prompts_and_large_batches_are_computed_by_single_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(tmp_path)
    monkeypatch.setattr(LayerStack, "run", lambda *_: pytest.fail("the stack was called"))
    cache = runner.make_cache(40, 16)
    runner.forward(cache, [SequenceSlice([1, 2, 3], 0, [0]), SequenceSlice([4], 0, [1])])
    runner.forward(cache, [SequenceSlice([4], 0, [page]) for page in range(33)])


def test_other_gguf_types_have_no_stack(tmp_path: Path) -> None:
    assert decoder_of(load(tmp_path, kind="Q5_0"))._stack is None


def test_windows_and_fp8_kv_have_no_stack(tmp_path: Path) -> None:
    runner = load(tmp_path)
    parameters = decoder_of(runner).parameters
    assert make_layer_stack(parameters, torch.float32, 0.1) is not None
    windowed = replace(parameters, config=replace(parameters.config, window=8))
    assert make_layer_stack(windowed, torch.float32, 0.1) is None
    assert make_layer_stack(parameters, torch.float8_e4m3fn, 0.1) is None


def test_float32_weights_have_no_stack() -> None:
    runner = ModelRunner.load(locate_model("smollm2"), device=CPU, dtype=torch.float32)
    assert decoder_of(runner)._stack is None
