"""Mixtures of experts, from config.json. No torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...common.errors import StartupError
from ..formats.json_fields import Json, integer, number, shown
from .sharding import Shard

Scoring = Literal["sigmoid", "softmax"]


@dataclass(frozen=True)
class MoeConfig:
    """Experts and their router. A token selects the best `groups_per_token` groups, then experts of these groups."""

    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int  # width of the shared experts, merged into one MLP; 0 if there is none
    num_groups: int
    groups_per_token: int
    normalised: bool  # whether the weights of a token's experts add up to `scale`
    scale: float
    scoring: Scoring = "sigmoid"
    biases: bool = False  # the router and the matrices of experts have biases
    limit: float | None = None  # gates are those of gpt-oss, with values clamped to this (kernels/moe/clamped_gate.py)

    @property
    def biased(self) -> bool:
        """Whether a bias per expert is added to the scores for the selection; weights are computed without it."""
        return self.scoring == "sigmoid"

    @property
    def active_size(self) -> int:
        """Width of all MLPs of a token."""
        return self.experts_per_token * self.expert_size + self.shared_size

    def share(self, shard: Shard, hidden_size: int) -> tuple[range, int]:
        """The experts that a rank holds, and its part of the width of each; raises StartupError if they cannot be
        divided.
        """
        experts, size = range(self.num_experts), self.expert_size
        if shard.whole_experts:
            experts = shard.part("n_routed_experts", self.num_experts)
        else:
            size = len(shard.part("moe_intermediate_size", self.expert_size))
        for name, count in (("hidden_size", hidden_size), ("a rank's share of moe_intermediate_size", size)):
            if count % 8:  # torch's grouped product needs rows of multiples of 16 bytes, in 16-bit elements
                raise StartupError(f"{name} = {count} must be a multiple of 8")
        return experts, size

    def shared_share(self, shard: Shard) -> int:
        """A rank's part of the width of the shared experts; raises StartupError."""
        return len(shard.part("shared experts' width", self.shared_size))


def read_grouped_moe(path: Path, raw: Json, *, glm: bool) -> MoeConfig:
    """DeepSeek's and GLM's fields: groups of experts, shared experts; raises StartupError."""
    size = integer(path, raw, "moe_intermediate_size")
    moe = MoeConfig(
        num_experts=integer(path, raw, "n_routed_experts"),
        experts_per_token=integer(path, raw, "num_experts_per_tok"),
        expert_size=size,
        shared_size=size * integer(path, raw, "n_shared_experts"),
        num_groups=integer(path, raw, "n_group", 1 if glm else 8),
        groups_per_token=integer(path, raw, "topk_group", 1 if glm else 4),
        normalised=bool(raw.get("norm_topk_prob", True)),
        scale=number(path, raw, "routed_scaling_factor", 2.5),
    )
    group_size, rest = divmod(moe.num_experts, moe.num_groups)
    if rest or group_size < 2 or not moe.experts_per_token <= moe.groups_per_token * group_size <= moe.num_experts:
        raise StartupError(
            f"{path}: num_experts_per_tok = {moe.experts_per_token} in topk_group = {moe.groups_per_token} of "
            f"n_group = {moe.num_groups} groups of n_routed_experts = {moe.num_experts}: groups must be equal and of "
            "two experts or more, topk_group at most n_group, and its groups must hold num_experts_per_tok experts"
        )
    return moe


def grouped_moe_layers(path: Path, raw: Json, num_layers: int) -> tuple[bool, ...]:
    """Which layers of a DeepSeek or GLM model have experts; raises StartupError."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        dense = integer(path, raw, "first_k_dense_replace", 3, least=0)
        return tuple(layer >= dense for layer in range(num_layers))
    if len(kinds) != num_layers or not {"dense", "sparse"}.issuperset(kinds):
        raise StartupError(
            f"{path}: mlp_layer_types must say 'dense' or 'sparse' for each of {num_layers} layers, got {shown(kinds)}"
        )
    return tuple(kind == "sparse" for kind in kinds)


def read_softmax_moe(path: Path, raw: Json, *, mixtral: bool) -> MoeConfig:
    """Mixtral's and Qwen3-MoE's fields: the softmax over all experts selects and weighs; raises StartupError."""
    count_name = "num_experts" if "num_experts" in raw else "num_local_experts"
    moe = MoeConfig(
        num_experts=integer(path, raw, count_name),
        experts_per_token=integer(path, raw, "num_experts_per_tok"),
        expert_size=integer(path, raw, "intermediate_size" if mixtral else "moe_intermediate_size"),
        shared_size=0,
        num_groups=1,
        groups_per_token=1,
        normalised=mixtral or bool(raw.get("norm_topk_prob", False)),
        scale=1.0,
        scoring="softmax",
    )
    if moe.experts_per_token > moe.num_experts:
        raise StartupError(
            f"{path}: num_experts_per_tok = {moe.experts_per_token} is more than {count_name} = {moe.num_experts}"
        )
    return moe


def read_gpt_oss_moe(path: Path, raw: Json) -> MoeConfig:
    """gpt-oss: weights are the softmax over the selected experts, which is the normalised softmax over all experts."""
    return replace(read_softmax_moe(path, raw, mixtral=True), biases=True, limit=number(path, raw, "swiglu_limit", 7.0))


def softmax_moe_layers(path: Path, raw: Json, num_layers: int) -> tuple[bool, ...]:
    """Which layers of a Mixtral or Qwen3-MoE model have experts; raises StartupError."""
    period = integer(path, raw, "decoder_sparse_step", 1)
    dense = set(raw.get("mlp_only_layers") or ())
    return tuple((layer + 1) % period == 0 and layer not in dense for layer in range(num_layers))
