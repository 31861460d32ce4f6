"""Triton kernel of selection.py: a program selects for one token, one maximum after another."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ...backends.overlap_triton import overlap_options, start_next, wait_for_previous
from .selection import SelectionRule


@triton.jit
def _select_experts(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    scale,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    GROUPS_PER_TOKEN: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    CHOICE_BLOCK: tl.constexpr,
    NORMALISED: tl.constexpr,
    SOFTMAX: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    token = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    logit = tl.load(logits_ptr + token * EXPERTS + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SOFTMAX:  # there is no bias
        score = tl.exp(logit - tl.max(logit, 0))
        score = score / tl.sum(score, 0)
        rest = tl.where(inside, score, float("-inf"))
    else:
        score = 1.0 / (1.0 + tl.exp(-logit))
        rest = tl.where(inside, score + tl.load(bias_ptr + expert, mask=inside, other=0.0), float("-inf"))
    if GROUPS > 1:
        group = tl.arange(0, GROUP_BLOCK)
        of_expert = expert // (EXPERTS // GROUPS)
        members = tl.where(of_expert[None, :] == group[:, None], rest[None, :], float("-inf"))
        others = tl.where(expert[None, :] == tl.argmax(members, 1)[:, None], float("-inf"), members)
        strength = tl.where(group < GROUPS, tl.max(members, 1) + tl.max(others, 1), float("-inf"))
        allowed = expert < 0
        for _ in tl.static_range(GROUPS_PER_TOKEN):
            best = tl.argmax(strength, 0)
            allowed = allowed | (of_expert == best)
            strength = tl.where(group == best, float("-inf"), strength)
        rest = tl.where(allowed, rest, float("-inf"))
    slot = tl.arange(0, CHOICE_BLOCK)
    weights = tl.zeros([CHOICE_BLOCK], tl.float32)
    chosen = tl.zeros([CHOICE_BLOCK], tl.int32)
    for choice in tl.static_range(PER_TOKEN):
        best = tl.argmax(rest, 0)
        weight = tl.sum(tl.where(expert == best, score, 0.0), 0)
        weights = tl.where(slot == choice, weight, weights)
        chosen = tl.where(slot == choice, best, chosen)
        rest = tl.where(expert == best, float("-inf"), rest)
    if NORMALISED:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    place = token * PER_TOKEN + slot
    tl.store(weights_ptr + place, weights * scale, mask=slot < PER_TOKEN)
    tl.store(experts_ptr + place, chosen.to(tl.int64), mask=slot < PER_TOKEN)


def launch_select_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    experts: torch.Tensor,
    rule: SelectionRule,
) -> None:
    """Fill `weights` and `experts` [T, k]."""
    (tokens, per_token), num_experts = weights.shape, logits.shape[1]
    if tokens == 0:
        return
    _select_experts[(tokens,)](
        logits,
        logits if bias is None else bias,  # not read
        weights,
        experts,
        rule.scale,
        EXPERTS=num_experts,
        BLOCK=triton.next_power_of_2(num_experts),
        GROUPS=rule.num_groups,
        GROUP_BLOCK=max(2, triton.next_power_of_2(rule.num_groups)),
        GROUPS_PER_TOKEN=rule.groups_per_token,
        PER_TOKEN=per_token,
        CHOICE_BLOCK=max(2, triton.next_power_of_2(per_token)),
        NORMALISED=rule.normalised,
        SOFTMAX=bias is None,
        num_warps=1,
        **overlap_options(logits.device),
    )
