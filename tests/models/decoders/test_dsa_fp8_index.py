"""Sparse models with indexer keys in fp8, against transformers with the same rounding of queries and keys."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from pdserve.common.errors import StartupError
from pdserve.configs.setting_types import IndexDtypeSetting
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.runner import ModelRunner, uses_fp8_index
from tests.checkpoints import load_reference, make_dsa_checkpoint, reference_greedy, reference_logits
from tests.models.layers.test_hot_rows import Twin

TOLERANCE = 2e-4
"""For logits of order 1. The same as without fp8: selections are equal, and nothing else depends on fp8."""
CPU = torch.device("cpu")
INDEX_DIM, LAYERS, TOPK = 32, 4, 16


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows rounded to e4m3 with a power of two as their scale."""
    scale = torch.exp2(torch.ceil(torch.log2(x.double().abs().amax(dim=-1, keepdim=True).clamp(min=1e-4) / 448)))
    return (x.double() / scale).float().to(torch.float8_e4m3fn).double().mul(scale).float()


class RoundedProduct(TorchFunctionMode):
    """Rounds the operands of the first matrix product, which multiplies queries and keys."""

    done = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.matmul and not self.done:
            self.done = True
            query, keys = args
            args = rounded(query), rounded(keys.transpose(-1, -2)).transpose(-1, -2)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def _rounding_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    for indexer in (DeepseekV32Indexer, GlmMoeDsaIndexer):

        def forward(self: Any, *args: Any, plain: Any = indexer.forward, **kwargs: Any) -> Any:
            with RoundedProduct() as mode:
                result = plain(self, *args, **kwargs)
            assert mode.done
            return result

        monkeypatch.setattr(indexer, "forward", forward)


def load(directory: Path, index_dtype: IndexDtypeSetting = "fp8_e4m3") -> ModelRunner:
    return ModelRunner.load(locate_model(str(directory)), device=CPU, dtype=torch.float32, index_dtype=index_dtype)


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pattern: dict[str, Any] = {"index_topk_pattern": "FSFF"} if request.param == "glm_moe_dsa" else {}
    return make_dsa_checkpoint(tmp_path_factory.mktemp(request.param), request.param, **pattern)


def logits_of(runner: ModelRunner, text: list[int], starts: list[int]) -> torch.Tensor:
    """Logits of all tokens, computed in steps that start at `starts`, over a cache whose bytes are NaN at first."""
    cache = runner.make_cache(32, 4)
    for pool in cache.pools:
        pool.data.view(torch.uint8).fill_(0x7F)
    pages = random.Random(1).sample(range(32), 25)
    rows = []
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        hidden = runner.forward_hidden(cache, [SequenceSlice(text[start:end], start, pages)])
        assert hidden is not None
        logits = runner.logits(hidden)
        assert logits is not None
        rows.append(logits)
    return torch.cat(rows)


@pytest.mark.usefixtures("_rounding_transformers")
@pytest.mark.parametrize("length", [9, 30, 80])
def test_logits_and_greedy_tokens_equal_transformers_with_rounding(directory: Path, length: int) -> None:
    """A prompt in two chunks and eight steps."""
    reference = load_reference(directory)
    text = random.Random(length).choices(range(256), k=length)
    text += reference_greedy(reference, text, 8)
    found = logits_of(load(directory), text, [0, length // 2, *range(length, length + 8)])
    torch.testing.assert_close(found, reference_logits(reference, text), rtol=0, atol=TOLERANCE)
    assert found[length - 1 : -1].argmax(-1).tolist() == text[length:]


def test_fp8_changes_logits_only_after_the_first_index_topk_tokens(directory: Path) -> None:
    """The first index_topk tokens select all tokens that they see, so scores have no effect."""
    text = random.Random(4).choices(range(256), k=100)
    found = logits_of(load(directory), text, [0, 50])
    expected = reference_logits(load_reference(directory), text)
    torch.testing.assert_close(found[:TOPK], expected[:TOPK], rtol=0, atol=TOLERANCE)
    assert float((found - expected).abs().max()) > 100 * TOLERANCE, "no selection differs"


def test_index_in_the_models_type_equals_transformers(directory: Path) -> None:
    """`model`, and `auto` on a CPU."""
    text = random.Random(4).choices(range(256), k=100)
    expected = reference_logits(load_reference(directory), text)
    for setting in ("model", "auto"):
        found = logits_of(load(directory, setting), text, [0, 50])
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_key_takes_a_byte_per_element_and_a_scale(directory: Path) -> None:
    runner = load(directory)
    cache = runner.make_cache(7, 4)
    latent, keys = cache.pools
    assert (keys.dtype_name, keys.plane_token_bytes) == ("float8_e4m3fn", (INDEX_DIM, 4))
    assert runner.kv_token_bytes == LAYERS * latent.head_token_bytes + keys.num_layers * (INDEX_DIM + 4)
    assert cache.size_bytes == 7 * 4 * runner.kv_token_bytes


def test_hot_buffers_beside_fp8_keys_give_the_same_logits(directory: Path) -> None:
    """Two sequences longer than their hot buffers: the same logits, bit for bit, as over a plain cache."""
    twin = Twin(load(directory), hot_rows=24)
    for slot in (0, 2):
        twin.start(slot, random.Random(slot).choices(range(256), k=40 + slot))
    for _ in range(8):
        twin.step([2, 0])


def test_pages_of_fp8_keys_are_lent_to_hot_buffers(tmp_path: Path) -> None:
    """A sequence is fully resident in lent pages. Then it returns them, and they hold keys of another sequence."""
    runner = load(make_dsa_checkpoint(tmp_path, index_head_dim=28))  # 8 pages of keys of 32 bytes are a hot page
    twin = Twin(runner, hot_rows=24)
    lent = twin.lend(5)
    assert len(lent) == 40
    twin.start(2, random.Random(2).choices(range(256), k=30), 40)
    twin.start(0, random.Random(0).choices(range(256), k=40))
    for _ in range(4):
        twin.step([2, 0])
    twin.resize(2, 24)
    twin.take_back(lent)
    twin.start(1, random.Random(9).choices(range(256), k=50))
    assert set(twin.pages[1]) <= set(lent)
    for _ in range(4):
        twin.step([2, 0, 1])


def test_auto_uses_fp8_on_gpus_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, capability = torch.device("cuda", 0), (9, 0)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    assert uses_fp8_index("auto", gpu, torch.bfloat16, 128)
    assert not uses_fp8_index("auto", gpu, torch.float32, 128)
    assert not uses_fp8_index("auto", gpu, torch.bfloat16, 30)
    assert uses_fp8_index("fp8_e4m3", gpu, torch.float32, 128)
    assert not uses_fp8_index("model", gpu, torch.bfloat16, 128)
    assert not uses_fp8_index("auto", CPU, torch.bfloat16, 128)
    assert uses_fp8_index("fp8_e4m3", CPU, torch.float32, 128)
    capability = (8, 6)
    assert not uses_fp8_index("auto", gpu, torch.bfloat16, 128)
    with pytest.raises(StartupError, match=r"capability 8\.9 or above, and cuda:0 has 8\.6: use model"):
        uses_fp8_index("fp8_e4m3", gpu, torch.bfloat16, 128)


def test_key_size_that_would_misalign_scales_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="index_head_dim that is a multiple of 4, got 30"):
        load(make_dsa_checkpoint(tmp_path, index_head_dim=30))
