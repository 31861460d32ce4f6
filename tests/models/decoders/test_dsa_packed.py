"""Sparse models with packed latent rows, against transformers with the same rounding of its cache."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention

from pdserve.common.errors import StartupError
from pdserve.models.decoders.dsa import DsaDecoder
from pdserve.models.decoders.latent_parameters import LatentParameters
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.loading.weights import load_weights
from pdserve.models.runner import ModelRunner
from tests.checkpoints import load_reference, make_dsa_checkpoint, reference_greedy, reference_logits
from tests.models.layers.test_hot_rows import Twin

TOLERANCE = 4e-3
"""For logits of order 1. The numbers that both sides round differ in their last bits, which sometimes changes a rounded
value (and logits by up to 2e-3). If only one side rounded, logits would differ by 0.2 and more."""
CPU = torch.device("cpu")
KV_RANK, ROPE_DIM, INDEX_DIM, LAYERS = 160, 16, 32, 4
"""Two scales per row, the second for fewer elements."""


def rounded(latent: torch.Tensor) -> torch.Tensor:
    """Rounded to e4m3 with a scale per 128 elements."""
    parts = []
    for group in latent.split(128, dim=-1):  # type: ignore[no-untyped-call]
        scale = group.abs().amax(dim=-1, keepdim=True) / 448
        parts.append((group / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(parts, dim=-1)


@pytest.fixture
def _rounding_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    for attention in (DeepseekV32Attention, GlmMoeDsaAttention):

        def expand(self: Any, latent: torch.Tensor, rope_part: torch.Tensor, plain: Any = attention.expand_kv) -> Any:
            return plain(self, rounded(latent), rope_part.to(torch.bfloat16).float())

        monkeypatch.setattr(attention, "expand_kv", expand)


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, Path]:
    directory = make_dsa_checkpoint(tmp_path_factory.mktemp(request.param), request.param, kv_lora_rank=KV_RANK)
    source = locate_model(str(directory))
    parameters = LatentParameters.allocate(source.config, device=CPU, dtype=torch.float32)
    load_weights(source, parameters.slots())
    return ModelRunner(DsaDecoder(parameters, packed=True), device=CPU, dtype=torch.float32), directory


@pytest.mark.usefixtures("_rounding_transformers")
@pytest.mark.parametrize("length", [9, 16, 70])
def test_logits_and_greedy_tokens_equal_transformers_with_rounding(
    model: tuple[ModelRunner, Path], length: int
) -> None:
    """A prompt in two chunks and eight steps."""
    runner, directory = model
    reference = load_reference(directory)
    text = random.Random(length).choices(range(256), k=length)
    text += reference_greedy(reference, text, 8)
    expected = reference_logits(reference, text)
    cache = runner.make_cache(32, 4)
    latent, keys = cache.pools
    latent.data.fill_(0x7F)  # NaN
    keys.data.fill_(50.0)
    pages = random.Random(1).sample(range(32), 20)
    starts = [0, length // 2, *range(length, length + 8)]
    rows = []
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        hidden = runner.forward_hidden(cache, [SequenceSlice(text[start:end], start, pages)])
        assert hidden is not None
        logits = runner.logits(hidden)
        assert logits is not None
        rows.append(logits)
    found = torch.cat(rows)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    assert found[length - 1 : -1].argmax(-1).tolist() == text[length:]


def test_error_of_packed_rows_is_small(tmp_path: Path) -> None:
    """In a case where it changes no selection: all tokens are visible, and there are no experts."""
    directory = make_dsa_checkpoint(tmp_path, kv_lora_rank=KV_RANK, first_k_dense_replace=LAYERS)
    source = locate_model(str(directory))
    parameters = LatentParameters.allocate(source.config, device=CPU, dtype=torch.float32)
    load_weights(source, parameters.slots())
    runner = ModelRunner(DsaDecoder(parameters, packed=True), device=CPU, dtype=torch.float32)
    text = random.Random(3).choices(range(256), k=16)
    hidden = runner.forward_hidden(runner.make_cache(4, 4), [SequenceSlice(text, 0, [3, 1, 0, 2])])
    assert hidden is not None
    logits = runner.logits(hidden)
    assert logits is not None
    expected = reference_logits(load_reference(directory), text)
    error = float((logits - expected).norm() / expected.norm())
    assert 0.005 < error < 0.05


def test_packed_token_takes_less_memory(model: tuple[ModelRunner, Path]) -> None:
    runner, _ = model
    cache = runner.make_cache(7, 4)
    latent, keys = cache.pools
    assert (latent.dtype_name, latent.head_token_bytes) == ("uint8", KV_RANK + 2 * 4 + 2 * ROPE_DIM)
    assert keys.head_token_bytes == INDEX_DIM * 4
    assert runner.kv_token_bytes == LAYERS * (latent.head_token_bytes + keys.head_token_bytes)
    assert cache.size_bytes == 7 * 4 * runner.kv_token_bytes


def test_hot_buffers_hold_packed_rows(model: tuple[ModelRunner, Path]) -> None:
    """Two sequences longer than their hot buffers: the same logits, bit for bit, as over a plain cache."""
    runner, _ = model
    twin = Twin(runner, hot_rows=24)
    for slot in (0, 2):
        twin.start(slot, random.Random(slot).choices(range(256), k=40 + slot))
    for _ in range(12):
        twin.step([2, 0])


def test_geometry_that_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    source = locate_model(str(make_dsa_checkpoint(tmp_path, kv_lora_rank=50)))
    parameters = LatentParameters.allocate(source.config, device=CPU, dtype=torch.float32)
    with pytest.raises(StartupError, match="multiple of 4, got 50"):
        DsaDecoder(parameters, packed=True)
