"""The routed experts of a mixture: every token through the gated MLPs of its experts, weighted and added.

    result[t]  =  sum_j weights[t, j] * mlp_{experts[t, j]}(x[t])       over the experts of this rank
    mlp_e(x)   =  swiglu(x @ gate_up[e].T) @ down[e].T

Shapes: x [T, hidden]; weights, experts [T, k]; gate_up [E, 2 * size, hidden]; down [E, hidden, size]; result
[T, hidden]. This rank has the E experts from number `first` on; the others contribute nothing. Products and swiglu are
rounded to the dtype of x; the sum is in the order of a token's experts, independent of the rest of the batch.

Block-scaled fp8 weights (linear/block_format.py) are multiplied with exact activations if experts have few tokens, and
with quantised ones otherwise, as in linear/block_scaled.py.
"""

import torch
from torch.nn.functional import grouped_mm

from ..linear.block_format import BlockScaled, Weight
from ..linear.quantise import quantise_reference
from ..linear.swiglu import swiglu, swiglu_reference

FEW_ROWS = 32
"""Up to this many tokens per expert on average, activations are exact."""


def has_few_rows(experts: torch.Tensor, num_experts: int) -> bool:
    """Whether the `num_experts` experts of all ranks have few tokens each on average: the only place that decides how
    block-scaled experts are computed.
    """
    return experts.numel() <= FEW_ROWS * num_experts


def grouped_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    first: int = 0,
    num_experts: int | None = None,
) -> torch.Tensor:
    """The sum over the experts of this rank; see the module docstring. `num_experts` are those of all ranks, by
    default those of this one.
    """
    if isinstance(gate_up, BlockScaled) or isinstance(down, BlockScaled):
        few = has_few_rows(experts, num_experts or len(gate_up))
        return block_scaled_experts_reference(x, weights, experts, gate_up, down, first=first, exact=few)
    everywhere = num_experts is None or num_experts == len(gate_up)
    return plain_experts(x, weights, experts, gate_up, down, first=None if everywhere else first)


def block_scaled_experts_reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    first: int,
    exact: bool,
) -> torch.Tensor:
    """Expert by expert, with activations that are `exact` or quantised."""

    def product(rows: torch.Tensor, matrix: Weight, expert: int) -> torch.Tensor:
        one = matrix[expert : expert + 1]
        if isinstance(one, BlockScaled):
            wide = rows.float() if exact else quantise_reference(rows).expanded()
            return (wide @ one.expanded()[0].T).to(x.dtype)
        return (rows.float() @ one[0].float().T).to(x.dtype)

    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(gate_up)):
        token, choice = (experts == first + expert).nonzero(as_tuple=True)
        part = product(swiglu_reference(product(x[token], gate_up, expert)), down, expert)
        result.index_add_(0, token, part.float() * weights[token, choice].float().unsqueeze(1))
    return result.to(x.dtype)


def plain_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    first: int | None = None,
) -> torch.Tensor:
    """With weights that are not quantised: one product of torch per expert over its tokens.

    With `first`, this rank's experts start at this number, and others contribute nothing. Tokens are sorted by expert,
    so that those of an expert are adjacent, and put back afterwards.
    """
    per_token, elsewhere = experts.shape[1], None
    if first is not None:
        experts = experts - first
        elsewhere = (experts < 0) | (experts >= len(gate_up))
        experts.masked_fill_(elsewhere, len(gate_up))  # sorted behind all experts of this rank, and not computed
    sorted_experts, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(len(gate_up), device=x.device)
    ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)  # end of each expert's tokens
    gated = swiglu(grouped_mm(x[order // per_token], gate_up.transpose(1, 2), offs=ends))
    results = grouped_mm(gated, down.transpose(1, 2), offs=ends)
    results = torch.empty_like(results).index_copy_(0, order, results).view(len(x), per_token, -1)
    if elsewhere is not None:
        results.masked_fill_(elsewhere.unsqueeze(-1), 0)
    return results.mul_(weights.unsqueeze(-1)).sum(dim=1)
