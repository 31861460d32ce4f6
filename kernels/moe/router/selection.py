"""Selects the experts of each token from the router's logits.

    s          =  sigmoid(logits) or, without a bias, softmax(logits)                             float32
    selection  =  the best experts by s + bias, within the groups whose two best experts have the largest sum
    weights    =  s of the selected experts, divided by their sum if `normalised`, times `scale`

Shapes: logits [T, E] in any float type, contiguous; bias [E] float32 or None; results [T, k]: weights in float32,
experts in int64, in no particular order. Groups are equal parts of the experts. In torch this takes a dozen launches,
three of them top-k.
"""

from dataclasses import dataclass

import torch

from ...backends.dispatch import Impl, launcher, use_triton


@dataclass(frozen=True)
class SelectionRule:
    """How many experts a token selects, and how they are weighted."""

    per_token: int
    num_groups: int
    groups_per_token: int
    normalised: bool
    scale: float


def select_experts_reference(
    logits: torch.Tensor, bias: torch.Tensor | None, rule: SelectionRule
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.float().softmax(dim=-1) if bias is None else logits.float().sigmoid()
    choice = scores if bias is None else scores + bias
    if rule.num_groups > 1:
        grouped = choice.view(len(logits), rule.num_groups, -1)  # [T, groups, experts of a group]
        strength = grouped.topk(2, dim=-1).values.sum(dim=-1)
        best = strength.topk(rule.groups_per_token, dim=-1, sorted=False).indices
        barred = torch.ones_like(strength, dtype=torch.bool).scatter_(-1, best, False)
        choice = grouped.masked_fill(barred.unsqueeze(-1), -torch.inf).flatten(1)
    experts = choice.topk(rule.per_token, dim=-1, sorted=False).indices
    weights = scores.gather(-1, experts)
    if rule.normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * rule.scale, experts


def select_experts(
    logits: torch.Tensor, bias: torch.Tensor | None, rule: SelectionRule, *, impl: Impl = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of each token; see the module docstring."""
    check_logits(logits, bias)
    if not use_triton(impl, logits.device):
        return select_experts_reference(logits, bias, rule)
    weights, experts = empty_selection(logits, rule)
    launcher("moe.router.selection_triton", "launch_select_experts")(logits, bias, weights, experts, rule)
    return weights, experts


def empty_selection(tokens: torch.Tensor, rule: SelectionRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts for each row of `tokens`, not filled yet."""
    weights = tokens.new_empty(len(tokens), rule.per_token, dtype=torch.float32)
    return weights, torch.empty(weights.shape, dtype=torch.int64, device=tokens.device)


def check_logits(logits: torch.Tensor, bias: torch.Tensor | None) -> None:
    if not logits.is_floating_point() or logits.ndim != 2 or not logits.is_contiguous():
        raise ValueError(f"logits {logits.dtype} {list(logits.shape)} must be contiguous rows of floats")
    if bias is not None and bias.shape != logits.shape[1:]:
        raise ValueError(f"logits {list(logits.shape)} must be rows of {len(bias)} experts")
