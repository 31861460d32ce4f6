"""KV in fp8: correctness, and the error relative to KV in the model's dtype."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.runner import ModelRunner
from tests.checkpoints import load_reference, make_checkpoint
from tests.fp8_reference import rounded_logits

CPU = torch.device("cpu")
PAGE_SIZE, PAGES = 4, [5, 0, 7, 2, 9, 1, 11, 4, 3, 12]
TOLERANCE = 1e-2
"""A key may be so close to the middle of two fp8 numbers that another order of summation changes its rounding. That
changes logits by up to a fifth of the error of rounding all keys."""


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def load(directory: Path, **settings: Any) -> ModelRunner:
    return ModelRunner.load(locate_model(str(directory)), device=CPU, dtype=torch.float32, **settings)


def all_logits(runner: ModelRunner, token_ids: list[int], chunks: list[int]) -> torch.Tensor:
    """Logits after the last token of each chunk, over a cache full of large values."""
    cache = runner.make_cache(13, PAGE_SIZE)
    cache.pools[0].data.fill_(50.0)
    found, start = [], 0
    for size in chunks:
        logits = runner.forward(cache, [SequenceSlice(token_ids[start : start + size], start, PAGES)])
        assert logits is not None
        found.append(logits[0].clone())
        start += size
    return torch.stack(found)


@pytest.mark.parametrize("chunks", [[40], [16, 7, 9, 4], [20, *[1] * 20]], ids=["prompt", "chunks", "decode"])
def test_logits_equal_a_model_that_rounds_its_cache(checkpoint: Path, chunks: list[int]) -> None:
    token_ids = random.Random(1).choices(range(256), k=sum(chunks))
    ends = torch.tensor(chunks).cumsum(0) - 1
    expected = rounded_logits(load_reference(checkpoint), token_ids)[ends]
    found = all_logits(load(checkpoint, kv_dtype="fp8_e4m3"), token_ids, chunks)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    exact = all_logits(load(checkpoint), token_ids, chunks)
    error = float((found - exact).norm() / exact.norm())
    assert 0.01 < error < 0.03, "three bits of mantissa: each key is off by 2 to 3 %"


def test_fp8_token_takes_one_byte_per_element(checkpoint: Path) -> None:
    full, small = load(checkpoint), load(checkpoint, kv_dtype="fp8_e4m3")
    assert full.kv_token_bytes == 4 * small.kv_token_bytes
    cache = small.make_cache(7, 4)
    assert cache.size_bytes == 7 * 4 * small.kv_token_bytes
    assert cache.pools[0].dtype_name == "float8_e4m3fn"


def test_fp8_pages_are_saved_and_loaded(checkpoint: Path) -> None:
    cache = load(checkpoint, kv_dtype="fp8_e4m3").make_cache(6, 4)
    (pool,) = cache.pools
    pool.data.copy_(torch.randn(pool.data.shape))
    before = pool.data.float()
    saved = cache.save([4, 1])
    pool.data.zero_()
    cache.load(saved, [0, 5, 3])
    assert pool.data[0].float().equal(before[4])
    assert pool.data[5].float().equal(before[1])
    assert not pool.data[3].float().any()
