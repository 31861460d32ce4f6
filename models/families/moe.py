"""Mixtral and Qwen3-MoE: the softmax over all experts selects and weighs."""

from dataclasses import dataclass, replace
from pathlib import Path

from ...common.errors import StartupError
from ..config.model import ModelConfig, Names
from ..config.moe import MoeConfig
from ..config.windows import WindowRule
from ..formats.json_fields import Json, integer
from .dense import WINDOWED, DenseFamily


@dataclass(frozen=True, kw_only=True)
class MixtureFamily(DenseFamily):
    """A family whose MLPs are mixtures of experts, or some of them."""

    expert_size: str  # the field with the width of an expert
    always_normalised: bool = False  # otherwise `norm_topk_prob` says whether the weights of a token add up to 1

    def read(self, path: Path, raw: Json) -> ModelConfig:
        config = super().read(path, raw)
        return replace(config, moe=self.read_moe(path, raw), mixed=_mixed_layers(path, raw, config.num_layers))

    def read_moe(self, path: Path, raw: Json) -> MoeConfig:
        count_name = "num_experts" if "num_experts" in raw else "num_local_experts"
        moe = MoeConfig(
            num_experts=integer(path, raw, count_name),
            experts_per_token=integer(path, raw, "num_experts_per_tok"),
            expert_size=integer(path, raw, self.expert_size),
            shared_size=0,
            num_groups=1,
            groups_per_token=1,
            normalised=self.always_normalised or bool(raw.get("norm_topk_prob", False)),
            scale=1.0,
            scoring="softmax",
        )
        if moe.experts_per_token > moe.num_experts:
            raise StartupError(
                f"{path}: num_experts_per_tok = {moe.experts_per_token} is more than {count_name} = {moe.num_experts}"
            )
        return moe


def _mixed_layers(path: Path, raw: Json, num_layers: int) -> tuple[bool, ...]:
    period = integer(path, raw, "decoder_sparse_step", 1)
    dense = set(raw.get("mlp_only_layers") or ())
    return tuple((layer + 1) % period == 0 and layer not in dense for layer in range(num_layers))


MIXTRAL = MixtureFamily(
    name="mixtral",
    architecture="MixtralForCausalLM",
    attention=WINDOWED,
    default_context=131072,
    default_theta=1_000_000.0,
    default_eps=1e-5,
    qkv_bias=False,
    o_bias=False,
    windows=WindowRule(everywhere=True, default=None),
    expert_size="intermediate_size",
    always_normalised=True,
    names=Names(mixture="block_sparse_moe", gate="w1", up="w3", down="w2"),
)
QWEN3_MOE = MixtureFamily(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    attention=WINDOWED,
    default_context=32768,
    qk_norm=True,
    windows=WindowRule(everywhere=True, switched=True, default=4096),
    expert_size="moe_intermediate_size",
)
