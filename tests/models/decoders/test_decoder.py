"""Logits and greedy tokens against transformers, on tiny random models of every supported shape."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.kernels.backends import dispatch
from pdserve.memory.kv_pool import KvCache
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.runner import ModelRunner
from tests.checkpoints import VOCAB_SIZE, is_reference_greedy, load_reference, make_checkpoint, reference_logits
from tests.kernels.numba_kernels import needs_numba

# The models' logits are of order 1; float32 sums in another order differ by a few 1e-6.
TOLERANCE = 3e-5


def load(directory: Path) -> ModelRunner:
    return ModelRunner.load(locate_model(str(directory)), device=torch.device("cpu"), dtype=torch.float32)


def poisoned_cache(runner: ModelRunner, num_pages: int, page_size: int) -> KvCache:
    """A cache full of large stale values: a read of an unwritten row spoils the result."""
    cache = runner.make_cache(num_pages, page_size)
    poison(cache)
    return cache


def poison(cache: KvCache) -> None:
    for pool in cache.pools:
        pool.data.fill_(50.0)


def run(runner: ModelRunner, cache: KvCache, *slices: SequenceSlice) -> torch.Tensor:
    logits = runner.forward(cache, slices)
    assert logits is not None
    return logits


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def pages_for(seed: int, tokens: int, page_size: int, num_pages: int) -> list[int]:
    return random.Random(seed).sample(range(num_pages), -(-tokens // page_size))


def greedy(runner: ModelRunner, cache: KvCache, token_ids: list[int], pages: list[int], new_tokens: int) -> list[int]:
    out: list[int] = []
    piece, start = token_ids, 0
    while len(out) < new_tokens:
        logits = run(runner, cache, SequenceSlice(piece, start, pages))
        start += len(piece)
        piece = [int(logits[0].argmax())]
        out += piece
    return out


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "attention_factor": 1.25,
    },
}

QWEN3_WINDOWS: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-eps": ("llama", {"rms_norm_eps": 0.1}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": ROPES["yarn"]}),
    "mistral": ("mistral", {"head_dim": 24}),
    "mixtral": ("mixtral", {}),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3-moe-some-layers": ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-other-fields": (
        "gemma3_text",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
            "attention_bias": True,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": ("gpt_oss", {}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 40}),
    "mixtral-window": ("mixtral", {"sliding_window": 40}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3-window": ("qwen3", QWEN3_WINDOWS),
    "qwen3-moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 24}),
    **{f"llama-rope-{name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_greedy_tokens_equal_transformers(shape: str, tmp_path: Path) -> None:
    architecture, overrides = SHAPES[shape]
    make_checkpoint(tmp_path, architecture, **overrides)
    runner, reference = load(tmp_path), load_reference(tmp_path)
    token_ids = prompt(1, 150)
    cache = poisoned_cache(runner, 32, 16)
    pages = pages_for(2, 200, 16, 32)

    expected = reference_logits(reference, token_ids)
    whole = run(runner, cache, SequenceSlice(token_ids, 0, pages))
    assert whole.shape == (1, VOCAB_SIZE)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole[0], expected[-1], rtol=0, atol=TOLERANCE)

    poison(cache)
    assert is_reference_greedy(reference, token_ids, greedy(runner, cache, token_ids, pages, 24))


@pytest.fixture(scope="module", params=["full", "windowed"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, Any]:
    windows = QWEN3_WINDOWS if request.param == "windowed" else {}
    directory = make_checkpoint(tmp_path_factory.mktemp("tiny-qwen3"), "qwen3", **windows)
    return load(directory), load_reference(directory)


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("chunks", [[40], [16, 16, 8], [1, 15, 1, 16, 7], [39, 1], [5, 5, 30]])
def test_chunked_prefill_returns_logits_of_every_chunk_end(
    tiny: tuple[ModelRunner, Any], page_size: int, chunks: list[int]
) -> None:
    runner, reference = tiny
    token_ids = prompt(3, 40)
    expected = reference_logits(reference, token_ids)
    cache = poisoned_cache(runner, 64, page_size)
    pages = pages_for(4, 40, page_size, 64)
    start = 0
    for length in chunks:
        logits = run(runner, cache, SequenceSlice(token_ids[start : start + length], start, pages))
        start += length
        torch.testing.assert_close(logits[0], expected[start - 1], rtol=0, atol=TOLERANCE)


def test_mixed_batch_computes_every_sequence_correctly(tiny: tuple[ModelRunner, Any]) -> None:
    """Whole prompts, a later chunk, single-token prompts and decode steps of very different lengths in one pass."""
    runner, reference = tiny
    page_size, num_pages = 4, 256
    cache = poisoned_cache(runner, num_pages, page_size)
    free = random.Random(5).sample(range(num_pages), num_pages)
    cases = [(70, 69), (9, 0), (33, 20), (1, 0), (4, 3), (130, 129), (16, 15), (17, 16), (12, 4), (67, 66)]
    slices, expected = [], []
    for number, (length, start) in enumerate(cases):
        token_ids = prompt(10 + number, length)
        pages = [free.pop() for _ in range(-(-length // page_size))]
        if start:
            run(runner, cache, SequenceSlice(token_ids[:start], 0, pages))
        slices.append(SequenceSlice(token_ids[start:], start, pages))
        expected.append(reference_logits(reference, token_ids)[-1])
    logits = run(runner, cache, *slices)
    torch.testing.assert_close(logits, torch.stack(expected), rtol=0, atol=TOLERANCE)


def test_only_rows_of_the_slice_are_written(tiny: tuple[ModelRunner, Any]) -> None:
    runner, _ = tiny
    cache = poisoned_cache(runner, 8, 4)
    run(runner, cache, SequenceSlice(prompt(6, 6), 0, [5, 2, 7]))
    (pool,) = cache.pools
    written = (pool.data != 50.0).any(dim=-1).all(dim=3).all(dim=2).all(dim=1)  # [page, token]
    untouched = (pool.data == 50.0).all(dim=-1).all(dim=3).all(dim=2).all(dim=1)
    expected = torch.zeros(8, 4, dtype=torch.bool)
    expected[5, :] = True
    expected[2, :2] = True
    assert written.equal(expected)
    assert untouched.equal(~expected)


@needs_numba
def test_logits_without_numba_kernels_equal_those_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_numba_allowed", True)  # restored at the end
    source = locate_model(str(make_checkpoint(tmp_path, "qwen3")))
    found = []
    for setting, enabled in (("numba", True), ("torch", False)):
        device, dtype = torch.device("cpu"), torch.float32
        runner = ModelRunner.load(source, device=device, dtype=dtype, cpu_kernels=setting)  # type: ignore[arg-type]
        assert dispatch.numba_computes() == enabled
        cache = poisoned_cache(runner, 4, 16)
        run(runner, cache, SequenceSlice(prompt(9, 20), 0, [2, 0]))
        found.append(run(runner, cache, SequenceSlice([7], 20, [2, 0])))
    torch.testing.assert_close(*found, rtol=0, atol=TOLERANCE)


def test_kv_token_bytes_equals_the_size_of_the_cache(tiny: tuple[ModelRunner, Any]) -> None:
    runner, _ = tiny
    assert runner.make_cache(7, 4).size_bytes == 7 * 4 * runner.kv_token_bytes


@pytest.mark.parametrize(
    "piece",
    [SequenceSlice([], 0, [0]), SequenceSlice([1, 2], 3, [0]), SequenceSlice([1], -1, [0]), SequenceSlice([1], 0, [])],
)
def test_slice_beyond_its_pages_is_refused(tiny: tuple[ModelRunner, Any], piece: SequenceSlice) -> None:
    runner, _ = tiny
    with pytest.raises(ValueError, match="do not fit"):
        runner.forward(runner.make_cache(2, 4), [piece])


def test_step_accepts_tokens_on_the_device(tiny: tuple[ModelRunner, Any]) -> None:
    runner, _ = tiny
    cache = poisoned_cache(runner, 8, 4)
    first, second = [3, 1], [7, 0]
    run(runner, cache, SequenceSlice(prompt(7, 6), 0, first), SequenceSlice(prompt(8, 5), 0, second))
    expected = run(runner, cache, SequenceSlice([9], 6, first), SequenceSlice([8], 5, second)).clone()
    unknown = [SequenceSlice([0], 6, first), SequenceSlice([0], 5, second)]
    assert not run(runner, cache, *unknown).equal(expected)
    found = runner.forward(cache, unknown, torch.tensor([9, 8]))
    assert found is not None
    assert found.equal(expected)
    with pytest.raises(ValueError, match="1 token ids for 2 slices"):
        runner.forward(cache, unknown, torch.tensor([9]))
    beside_chunk = [SequenceSlice([8], 5, second), SequenceSlice(prompt(9, 2), 6, first)]
    expected = run(runner, cache, *beside_chunk).clone()
    found = runner.forward(cache, [unknown[1], beside_chunk[1]], torch.tensor([8, 3]))
    assert found is not None
    assert found.equal(expected)
