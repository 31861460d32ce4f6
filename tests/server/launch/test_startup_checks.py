"""Settings that cannot work are refused before anything starts, in one line that names valid values."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.common.errors import StartupError
from pdserve.configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from pdserve.models.config.sharding import Shard
from pdserve.models.decoders.dense_parameters import DecoderParameters
from pdserve.models.decoders.latent_parameters import LatentParameters
from pdserve.models.loading.catalog import ModelSource, locate_model
from pdserve.server.launch.startup_checks import check_startup
from tests.checkpoints import make_checkpoint, make_dsa_checkpoint


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """4 query and 2 KV heads, 3 layers."""
    return locate_model(str(make_checkpoint(tmp_path_factory.mktemp("dense") / "dense")))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """4 layers, 8 experts, attention to 16 tokens."""
    return locate_model(str(make_dsa_checkpoint(tmp_path_factory.mktemp("sparse") / "sparse")))


def problems(config: AnyServerConfig, source: ModelSource) -> list[str]:
    try:
        check_startup(config, source)
    except StartupError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"tp": 3}, "tp = 3 does not divide num_attention_heads = 4: --tp may be 1, 2 or 4"),
        ({"pp": 4}, "pp = 4 stages for a model of 3 layers: give at most 3"),
        ({"transport": "nvlink", "device": "cpu"}, "transport nvlink moves KV between GPUs, and device is cpu: use"),
        ({"ib_device": "0=mlx5_0", "transport": "rdma"}, "ib_device mlx5_0 does not exist; devices of this machine"),
        # 2 planes x 3 layers x 2 heads x 16 values x 4 bytes x 16 tokens
        ({"kv_memory_gib": 1e-6, "device": "cpu"}, "kv_memory_gib = 1e-06 is less than one page: a page of 16 tokens "
         "takes 12288 bytes or more"),
        ({"kv_memory_gib": 2e-6, "kv_dtype": "fp8_e4m3"}, "kv_memory_gib = 2e-06 is less than one page: a page of 16 "
         "tokens takes 3072 bytes or more"),
    ],
)  # fmt: skip
def test_setting_that_does_not_fit_is_reported_in_one_line(
    dense: ModelSource, settings: dict[str, Any], line: str
) -> None:
    for role in (PrefillConfig, DecodeConfig):
        (problem,) = problems(role(**settings), dense)
        assert problem.startswith(line)


def test_hisparse_needs_a_sparse_model(dense: ModelSource, sparse: ModelSource, tmp_path: Path) -> None:
    config = DecodeConfig(enable_hisparse=True)
    latent = locate_model(str(make_dsa_checkpoint(tmp_path / "latent", "deepseek_v3")))
    assert problems(config, latent) == [
        "enable_hisparse needs a model with sparse attention (deepseek_v32, glm_moe_dsa), and latent is deepseek_v3, "
        "which reads the rows of all tokens in every step: host memory is too slow for that"
    ]
    assert problems(DecodeConfig(kv_dtype="fp8_e4m3"), latent) == [
        "kv_dtype fp8_e4m3 is not supported for deepseek_v3 (latent): use auto"
    ]
    assert problems(config, dense) == [
        "enable_hisparse needs a model with sparse attention (deepseek_v32, glm_moe_dsa), and dense is llama"
    ]
    assert problems(config, sparse) == []


@pytest.mark.parametrize(
    ("hot_rows", "line"),
    [
        (8, "hot_rows = 8 is below the model's index_topk = 16: a step reads that many rows; give 16 or a larger "
         "multiple of page_size = 8"),
        (20, "hot_rows = 20 must be a multiple of page_size = 8: give 16 or 24"),
        (24, None),
    ],
)  # fmt: skip
def test_hot_rows_must_fit_model_and_pages(sparse: ModelSource, hot_rows: int, line: str | None) -> None:
    config = DecodeConfig(enable_hisparse=True, hot_rows=hot_rows, page_size=8)
    assert problems(config, sparse) == ([line] if line is not None else [])


def test_index_keys_that_have_no_fp8_format_are_reported(sparse: ModelSource, tmp_path: Path) -> None:
    odd = locate_model(str(make_dsa_checkpoint(tmp_path / "odd", index_head_dim=30)))
    for role in (PrefillConfig, DecodeConfig):
        assert problems(role(index_dtype="fp8_e4m3"), odd) == [
            "index_dtype fp8_e4m3 needs an index_head_dim that is a multiple of 4, and odd has 30"
        ]
        assert problems(role(), odd) == problems(role(index_dtype="fp8_e4m3"), sparse) == []


def test_hot_rows_error_names_the_only_fitting_value(sparse: ModelSource) -> None:
    (problem,) = problems(DecodeConfig(enable_hisparse=True, hot_rows=17, page_size=32), sparse)
    assert problem == "hot_rows = 17 must be a multiple of page_size = 32: give 32"


def test_all_problems_are_reported_at_once(sparse: ModelSource) -> None:
    config = DecodeConfig(tp=3, pp=5, enable_hisparse=True, hot_rows=20)
    found = problems(config, sparse)
    assert [line.split(" ")[0] for line in found] == ["tp", "pp", "hot_rows"]
    assert found[0].endswith("--tp may be 1, 2 or 4")


def test_missing_mooncake_wheel_is_reported(dense: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check, prefill would fail at its first transfer."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    (problem,) = problems(PrefillConfig(), dense)
    assert problem.startswith("the Mooncake transfer engine is not installed: pip install 'pdserve[cpu]'")


def test_dp_attention_divides_experts_and_not_heads(dense: ModelSource, sparse: ModelSource) -> None:
    """The sparse model has four heads and eight experts."""
    assert problems(DecodeConfig(tp=8, dp_attention=True), sparse) == []
    (problem,) = problems(DecodeConfig(tp=3, dp_attention=True), sparse)
    assert problem == "tp = 3 does not divide n_routed_experts = 8: --tp may be 1, 2, 4 or 8"
    (problem,) = problems(PrefillConfig(tp=2, dp_attention=True), dense)
    assert problem == f"dp_attention needs a model with experts, and {dense.config.architecture} has none"


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_dp_attention_takes_more_ranks_than_heads(tmp_path: Path, architecture: Any) -> None:
    """4 query and 2 KV heads, 8 experts."""
    source = locate_model(str(make_checkpoint(tmp_path, architecture)))
    assert problems(DecodeConfig(tp=8, dp_attention=True), source) == []
    (problem,) = problems(DecodeConfig(tp=8), source)
    assert problem.startswith("tp = 8 does not divide num_attention_heads = 4")
    token_bytes = 2 * 3 * 2 * source.config.head_dim * 4  # of all KV heads
    (problem,) = problems(DecodeConfig(tp=8, dp_attention=True, kv_memory_gib=1e-9, device="cpu"), source)
    assert f"a page of 16 tokens takes {16 * token_bytes} bytes" in problem


@pytest.mark.parametrize("whole_experts", [False, True])
def test_startup_checks_agree_with_the_ranks(
    dense: ModelSource, sparse: ModelSource, tmp_path: Path, whole_experts: bool
) -> None:
    odd = make_checkpoint(tmp_path / "odd", num_attention_heads=12, hidden_size=96, num_key_value_heads=3)
    experts = make_dsa_checkpoint(tmp_path / "experts", num_attention_heads=8, num_key_value_heads=8)
    verdicts: list[bool] = []
    for source in (dense, sparse, locate_model(str(odd)), locate_model(str(experts))):
        allocate = DecoderParameters.allocate if source.config.mla is None else LatentParameters.allocate
        for tp in range(1, 13):
            fits = not problems(PrefillConfig(tp=tp, expert_parallel=whole_experts), source)
            shards = [Shard.of(rank, tp_size=tp, stages=1, whole_experts=whole_experts) for rank in range(tp)]
            try:
                for shard in shards:
                    allocate(source.config, shard, device=torch.device("meta"), dtype=torch.float32)
                can = True
            except StartupError:
                can = False
            assert fits == can, (source.name, tp)
            verdicts.append(fits)
    assert 10 < sum(verdicts) < len(verdicts) - 10, "some tp fit and some do not"
