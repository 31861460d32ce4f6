"""What is read from config.json of the families with full attention, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.configs.errors import StartupError
from pdserve.models.config.model import ModelConfig, read_hf_config
from pdserve.models.config.sharding import Shard
from tests.checkpoints import TinyArchitecture, make_checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    names: tuple[TinyArchitecture, ...] = ("mistral", "mixtral", "qwen3_moe")
    for name in names:
        make_checkpoint(root / name, name)
    return root


def read(checkpoints: Path, tmp_path: Path, name: str, **changes: Any) -> ModelConfig:
    """The configuration with changed fields; None removes one."""
    raw = json.loads((checkpoints / name / "config.json").read_text()) | changes
    raw = {key: value for key, value in raw.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return read_hf_config(tmp_path)


def test_experts_are_read(checkpoints: Path, tmp_path: Path) -> None:
    mixtral, qwen3 = (read_hf_config(checkpoints / name) for name in ("mixtral", "qwen3_moe"))
    assert mixtral.moe is not None
    assert qwen3.moe is not None
    assert (mixtral.moe.expert_size, mixtral.moe.normalised, mixtral.mixed) == (96, True, (True,) * 3)
    assert (qwen3.moe.expert_size, qwen3.moe.normalised, qwen3.qk_norm) == (48, False, True)
    assert (qwen3.moe.num_experts, qwen3.moe.experts_per_token, qwen3.moe.scoring) == (8, 2, "softmax")
    published = read(checkpoints, tmp_path, "qwen3_moe", num_local_experts=None, num_experts=4, mlp_only_layers=[0])
    assert published.moe is not None
    assert (published.moe.num_experts, published.mixed) == (4, (False, True, True))


def test_active_parameters_count_the_selected_experts(checkpoints: Path) -> None:
    dense, mixtral = (read_hf_config(checkpoints / name) for name in ("mistral", "mixtral"))
    mlp = 3 * dense.hidden_size * dense.intermediate_size * dense.num_layers
    assert mixtral.active_parameters == dense.active_parameters + mlp  # two experts, each as wide as the MLP


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("mistral", {"sliding_window": 4096}, "sliding_window is 4096; only full attention is supported"),
        ("mistral", {"sliding_window": None}, "sliding_window is 4096 by default; only full attention"),
        ("mixtral", {"sliding_window": 128}, "sliding_window is 128; only full attention is supported"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than num_local_experts = 8"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size must be a positive integer, got 0"),
        ("qwen3_moe", {"num_local_experts": None}, "num_local_experts is missing"),
    ],
)
def test_what_would_change_the_result_is_refused(
    checkpoints: Path, tmp_path: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(StartupError, match=said):
        read(checkpoints, tmp_path, name, **changes)


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        (Shard(tp_size=2, dp_attention=True), "dp_attention needs latent attention"),
        (Shard(tp_size=3), "tp = 3 does not divide num_attention_heads = 4"),
        (Shard(tp_size=4), "a rank's share of moe_intermediate_size = 12 must be a multiple of 8"),
    ],
)
def test_impossible_divisions_are_refused(checkpoints: Path, shard: Shard, said: str) -> None:
    with pytest.raises(StartupError, match=said):
        read_hf_config(checkpoints / "qwen3_moe").check_shares(shard)
