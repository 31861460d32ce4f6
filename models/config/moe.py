"""Mixtures of experts. No torch."""

from dataclasses import dataclass
from typing import Literal

from ...common.errors import StartupError
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
