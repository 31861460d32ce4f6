"""Fields of config.json that are read or refused, for families without latent attention."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import StartupError
from pdserve.models.config.model import ModelConfig
from pdserve.models.config.rope import RopeConfig
from pdserve.models.config.sharding import Shard
from pdserve.models.registry import read_config_file
from tests.checkpoints import TinyArchitecture, make_checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    names: tuple[TinyArchitecture, ...] = ("mistral", "mixtral", "qwen2", "qwen3_moe", "gemma3_text", "gpt_oss")
    for name in names:
        make_checkpoint(root / name, name)
    return root


def read(checkpoints: Path, tmp_path: Path, name: str, **changes: Any) -> ModelConfig:
    """The configuration with changed fields; None removes one."""
    raw = json.loads((checkpoints / name / "config.json").read_text()) | changes
    raw = {key: value for key, value in raw.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return read_config_file(tmp_path / "config.json")


def test_experts_are_read(checkpoints: Path, tmp_path: Path) -> None:
    mixtral, qwen3 = (read_config_file(checkpoints / name / "config.json") for name in ("mixtral", "qwen3_moe"))
    assert mixtral.moe is not None
    assert qwen3.moe is not None
    assert (mixtral.moe.expert_size, mixtral.moe.normalised, mixtral.mixed) == (96, True, (True,) * 3)
    assert (qwen3.moe.expert_size, qwen3.moe.normalised, qwen3.qk_norm) == (48, False, True)
    assert (qwen3.moe.num_experts, qwen3.moe.experts_per_token, qwen3.moe.scoring) == (8, 2, "softmax")
    published = read(checkpoints, tmp_path, "qwen3_moe", num_local_experts=None, num_experts=4, mlp_only_layers=[0])
    assert published.moe is not None
    assert (published.moe.num_experts, published.mixed) == (4, (False, True, True))


def test_windows_are_read(checkpoints: Path, tmp_path: Path) -> None:
    def windows(name: str, **changes: Any) -> list[int | None]:
        config = read(checkpoints, tmp_path, name, **changes)
        return [config.window_of(layer) for layer in range(config.num_layers)]

    assert windows("mistral", sliding_window=8) == [8, 8, 8]
    assert windows("mistral") == [4096, 4096, 4096]  # the default of a configuration that does not mention it
    assert read_config_file(checkpoints / "mistral" / "config.json").window is None  # null
    assert windows("gemma3_text", layer_types=None) == [24, 24, None]
    assert windows("gpt_oss", layer_types=None) == [24, None, 24]
    assert windows("mixtral") == [None, None, None]
    assert windows("qwen3_moe", use_sliding_window=True, sliding_window=8) == [8, 8, 8]
    switched = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
    assert windows("qwen2", **switched, max_window_layers=1) == [None, 8, 8]
    assert windows("qwen2", **switched) == [None, None, None], "by default, the first 28 layers have none"
    assert windows("qwen3_moe", use_sliding_window=False, sliding_window=8) == [None, None, None]


def test_pages_are_freed_only_if_all_layers_have_a_window(checkpoints: Path, tmp_path: Path) -> None:
    assert read(checkpoints, tmp_path, "mistral", sliding_window=8).page_window == 8
    assert read(checkpoints, tmp_path, "mistral", sliding_window=1).page_window is None
    assert read(checkpoints, tmp_path, "mixtral").page_window is None
    assert read(checkpoints, tmp_path, "gpt_oss", layer_types=None).page_window is None
    assert read(checkpoints, tmp_path, "gemma3_text", layer_types=None).page_window is None
    assert read(checkpoints, tmp_path, "qwen3_moe", use_sliding_window=True, sliding_window=8).page_window == 8


def test_old_spelling_of_the_two_ropes_of_gemma_is_read(checkpoints: Path, tmp_path: Path) -> None:
    spelling: dict[str, Any] = {"rope_parameters": None, "rope_theta": 5e5, "rope_local_base_freq": 2e4}
    spelling |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = read(checkpoints, tmp_path, "gemma3_text", **spelling)
    assert config.rope == RopeConfig("linear", 5e5, 8.0)
    assert config.local_rope == RopeConfig(theta=2e4)


def test_scaling_beside_the_two_ropes_of_gemma_is_that_of_full_attention(checkpoints: Path, tmp_path: Path) -> None:
    """Users add it like this to a configuration of transformers 5, which applies it."""
    scaled = read(checkpoints, tmp_path, "gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert scaled.rope == RopeConfig(kind="linear", theta=1_000_000.0, factor=8.0)
    assert scaled.local_rope == RopeConfig(theta=10_000.0)


def test_active_parameters_count_the_selected_experts(checkpoints: Path) -> None:
    dense, mixtral = (read_config_file(checkpoints / name / "config.json") for name in ("mistral", "mixtral"))
    mlp = 3 * dense.hidden_size * dense.intermediate_size * dense.num_layers
    assert mixtral.active_parameters == dense.active_parameters + mlp  # two experts, each as wide as the MLP


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
        (
            "mistral",
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            "layer_types has full_attention beside sliding_window = 8, which all layers of this family have",
        ),
        ("mistral", {"sliding_window": 8, "layer_types": ["sliding_attention"]}, "one entry for each of 3 layers"),
        (
            "gemma3_text",
            {"hidden_activation": "gelu"},
            "hidden_activation 'gelu' is not supported; supported is",
        ),
        (
            "qwen2",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}, "sliding_attention": {}}},
            r"rope parameters of some layers \(full_attention\) are not supported here",
        ),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported; supported is"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        (
            "gemma3_text",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "quantized weights are not supported for gemma3_text; supported are 16 and 32 bits",
        ),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "awq"}},
            r"quantized weights \(awq\) are not supported; supported are mxfp4 experts",
        ),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than num_local_experts = 8"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size must be a positive integer, got 0"),
        ("qwen3_moe", {"num_local_experts": None}, "num_local_experts is missing"),
    ],
)
def test_unsupported_fields_are_refused(
    checkpoints: Path, tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        read(checkpoints, tmp_path, name, **changes)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (Shard(tp_size=3), "tp = 3 does not divide num_attention_heads = 4"),
        (Shard(tp_size=4), "a rank's share of moe_intermediate_size = 12 must be a multiple of 8"),
    ],
)
def test_impossible_divisions_are_refused(checkpoints: Path, shard: Shard, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        read_config_file(checkpoints / "qwen3_moe" / "config.json").check_shares(shard)
