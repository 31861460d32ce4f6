"""The routed experts of a mixture-of-experts layer: computes the gated MLPs of each token's experts, and adds the
weighted results.

    result[t]  =  sum_j weights[t, j] * mlp_{experts[t, j]}(x[t])  [+ shared[t]]       over the experts of this rank
    mlp_e(x)   =  swiglu(x @ gate_up[e].T) @ down[e].T

Shapes: x [T, hidden]; weights, experts [T, k]; gate_up [E, 2 * size, hidden]; down [E, hidden, size]; result
[T, hidden]. This rank has the E experts from number `first` on, and skips all others. Products and swiglu are rounded
to the dtype of x. Results are added in the order of a token's experts, independent of the rest of the batch. `shared`,
the result of the shared expert, is added last.

On CUDA, tokens are sorted by expert (router/routing.py), and one kernel computes the tiles of all experts; the host
does not wait for the device. The kernel depends on the weights:

- Block-scaled fp8 weights (linear/fp8_format.py) are multiplied with exact activations if experts have few tokens or
  if only one of the matrices is block-scaled, and otherwise with quantised activations, as in linear/fp8_linear.py.
  On Hopper, experts with few tokens have a CUDA kernel (expert_tiles_cuda.py).
- 4-bit weights (packed4/group_format.py) have a Triton kernel. If experts have many tokens, rows are copied into the
  order of experts, and weights are expanded for torch's grouped product (expanded_experts.py).
- 16-bit weights have a Triton kernel if experts have few tokens. Otherwise rows are copied into the order of experts
  for torch's grouped product.

Up to 4 tokens are not sorted: two kernels compute all their experts (token_experts_cuda.py). These kernels do not round
the results of experts before they add them, and their order of additions depends on the number of tokens.

Experts of gpt-oss have biases, `gate_up_bias` [E, 2 * size] and `down_bias` [E, hidden], which are added to the
products, and a `limit`, which selects the gate of clamped_gate.py. Their weights have 4 bits, or are plain weights in
torch's grouped product.

Lower bounds: with few tokens, the weights of all experts that have tokens, read once; with many, the products.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import grouped_mm

from ...common.arithmetic import ceil_div
from ..backends.dispatch import Impl, launcher, use_triton
from ..backends.half_products import grouped_reference
from ..backends.occupancy import shared_memory
from ..linear.fp8_format import Fp8Matrix, Weight
from ..linear.quantise import quantise, quantise_reference, swiglu_quantise
from ..linear.row_tiles import RowTiles
from ..linear.swiglu import swiglu, swiglu_reference
from ..packed4.group_format import GroupScaled
from .clamped_gate import clamped_gate
from .expanded_experts import expanded_results, expansion_pays
from .expert_tiles_cuda import TILE_ROWS, launch_expert_tiles, suits_expert_tiles
from .router.routing import route_tokens
from .token_experts_cuda import launch_token_experts, suits_token_experts

_WIDE_BYTES = 160 << 10
"""Shared memory that tiles of 64 rows with 4-bit weights need: two stages, and the expanded weights of one."""
FEW_ROWS = 32
"""Up to this many tokens per expert on average, activations are exact."""


def has_few_rows(numbers: int, num_experts: int) -> bool:
    """Whether `num_experts` experts have few tokens each on average; `numbers` is the total of all experts."""
    return numbers <= FEW_ROWS * num_experts


def tile_rows(numbers: int, num_experts: int) -> int:
    """Rows of a tile: about twice the average of an expert if it has few tokens, at most 64; otherwise 64 or 128."""
    average = ceil_div(numbers, num_experts)
    if has_few_rows(numbers, num_experts):
        return 16 if average <= 8 else 32 if average <= 16 else 64
    return 64 if average <= 96 else 128


def grouped_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    first: int = 0,
    num_experts: int | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    limit: float | None = None,
    shared: Callable[[], torch.Tensor] | None = None,
    routing: RowTiles | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """The sum over the experts of this rank, plus the result of `shared`, [T, hidden]; see the module docstring.
    `shared` is called late, because it may wait for another stream. `num_experts` is the number of experts of all
    ranks, by default of this rank. `routing` has the tokens in tiles of `routing_rows`, if the caller has sorted them
    already.
    """
    num_experts = num_experts or len(gate_up)
    few, on_triton = has_few_rows(experts.numel(), num_experts), use_triton(impl, x.device)
    exact = few or not (isinstance(gate_up, Fp8Matrix) and isinstance(down, Fp8Matrix))
    options = gate_up_bias, down_bias, limit
    if isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        if not _sorts_plain(x, limit, impl):
            own = None if num_experts == len(gate_up) else first
            routed = plain_experts(x, weights, experts, gate_up, down, *options, first=own)
            return routed if shared is None else routed + shared()
    elif not on_triton:
        routed = experts_reference(x, weights, experts, gate_up, down, *options, first=first, exact=exact)
        return routed if shared is None else routed + shared()
    _check(x, weights, experts, gate_up, down)
    out = torch.empty_like(x)
    plain = all(each is None for each in options)
    if plain and suits_token_experts(x, experts.shape[1], gate_up, down):
        launch_token_experts(x, weights, experts, gate_up, down, out, first=first, shared=shared)
        return out
    if routing is None:
        rows = _tile_rows_of(x, experts.numel(), gate_up, down, num_experts, plain=plain)
        routing = route_tokens(experts, first, len(gate_up), rows, impl=impl)
    place = None
    if isinstance(gate_up, GroupScaled):
        assert isinstance(down, GroupScaled), "both matrices are in 4 bits, or neither"
        if expansion_pays(experts.numel(), num_experts, x.dtype, x.device):
            place = routing.place
            results = expanded_results(_sorted_rows(x, routing), routing.ends, gate_up, down, *options)
        else:
            results = _packed_results(x, routing, gate_up, down, *options)
    elif plain and suits_expert_tiles(x, gate_up, down, ceil_div(experts.numel(), num_experts)):
        results = _tiled_results(x, routing, gate_up, down)
    elif few or not (isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)):
        compute = _exact_results if exact else _quantised_results
        results = compute(x, routing, gate_up, down, impl)
    else:
        results, place = _grouped_results(x, routing, gate_up, down), routing.place
    add = launcher("moe.token_rows_triton", "launch_weighted_sum")
    add(results, weights, experts, first, len(gate_up), out, place=place, shared=None if shared is None else shared())
    return out


def routing_rows(
    x: torch.Tensor,
    per_token: int,
    gate_up: Weight,
    down: Weight,
    *,
    num_experts: int,
    plain: bool = True,
    limit: float | None = None,
) -> int | None:
    """The rows of the tiles into which `grouped_experts` sorts tokens with `per_token` experts each; None if it does
    not sort them. `plain` means that experts have neither biases nor a limit.
    """
    if isinstance(gate_up, torch.Tensor) and not _sorts_plain(x, limit, "auto"):
        return None
    if not use_triton("auto", x.device) or (plain and suits_token_experts(x, per_token, gate_up, down)):
        return None
    return _tile_rows_of(x, len(x) * per_token, gate_up, down, num_experts, plain=plain)


def _sorts_plain(x: torch.Tensor, limit: float | None, impl: Impl) -> bool:
    """Whether tokens are sorted by Triton for weights that are not quantised."""
    return limit is None and use_triton(impl, x.device) and (x.dtype.itemsize == 2 or impl == "triton")


def _tile_rows_of(
    x: torch.Tensor, numbers: int, gate_up: Weight, down: Weight, num_experts: int, *, plain: bool
) -> int:
    if plain and suits_expert_tiles(x, gate_up, down, ceil_div(numbers, num_experts)):
        return TILE_ROWS
    rows = tile_rows(numbers, num_experts)
    if isinstance(gate_up, GroupScaled):
        return min(rows, 64 if shared_memory(x.device) >= _WIDE_BYTES else 32)
    return rows


def _exact_results(x: torch.Tensor, routing: RowTiles, gate_up: Weight, down: Weight, _impl: Impl) -> torch.Tensor:
    """Results [T * k, hidden] of all numbers (routing.py) of this rank's experts; other rows are undefined."""
    launch = launcher("linear.few_rows_triton", "launch_few_rows")
    numbers = len(routing.order)
    gated = x.new_empty(numbers, gate_up.shape[1] // 2)
    launch(x, gate_up, gated, gated=True, tiles=routing, gather=True)
    results = x.new_empty(numbers, x.shape[1])
    launch(gated, down, results, gated=False, tiles=routing, gather=False)
    return results


def _tiled_results(x: torch.Tensor, routing: RowTiles, gate_up: Weight, down: Weight) -> torch.Tensor:
    """The same by CUDA on Hopper."""
    assert isinstance(gate_up, Fp8Matrix)
    assert isinstance(down, Fp8Matrix)
    numbers = len(routing.order)
    gated, results = x.new_empty(numbers, down.shape[2]), x.new_empty(numbers, x.shape[1])
    launch_expert_tiles(x, gate_up, down, gated, results, routing)
    return results


def _quantised_results(x: torch.Tensor, routing: RowTiles, gate_up: Weight, down: Weight, impl: Impl) -> torch.Tensor:
    """The same with quantised activations."""
    assert isinstance(gate_up, Fp8Matrix)
    assert isinstance(down, Fp8Matrix)
    launch = launcher("linear.many_rows_triton", "launch_many_rows")
    numbers = len(routing.order)
    both = x.new_empty(numbers, gate_up.shape[1])
    launch(quantise(x, impl=impl), gate_up, both, tiles=routing, gather=True)
    gated = swiglu_quantise(both, live_rows=routing.ends[-1:], impl=impl)
    results = x.new_empty(numbers, x.shape[1])
    launch(gated, down, results, tiles=routing, gather=False)
    return results


def _sorted_rows(x: torch.Tensor, routing: RowTiles) -> torch.Tensor:
    """Rows [T * k, hidden] of tokens in the order of experts; those of other ranks' experts are undefined."""
    rows = x.new_empty(len(routing.order), x.shape[1])
    launcher("moe.token_rows_triton", "launch_gather")(x, routing, rows)
    return rows


def _grouped_results(x: torch.Tensor, routing: RowTiles, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The same by torch's grouped products, in the order of experts; see `RowTiles.place`."""
    gated = swiglu(grouped_mm(_sorted_rows(x, routing), gate_up.transpose(1, 2), offs=routing.ends))
    return grouped_mm(gated, down.transpose(1, 2), offs=routing.ends)


def _packed_results(
    x: torch.Tensor,
    routing: RowTiles,
    gate_up: GroupScaled,
    down: GroupScaled,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    limit: float | None,
) -> torch.Tensor:
    """The same with 4-bit weights."""
    launch = launcher("moe.packed_experts_triton", "launch_packed_experts")
    numbers = len(routing.order)
    gated = x.new_empty(numbers, gate_up.shape[1] // 2)
    launch(x, gate_up, gate_up_bias, gated, gated=True, limit=limit, tiles=routing, gather=True)
    results = x.new_empty(numbers, x.shape[1])
    launch(gated, down, down_bias, results, gated=False, limit=None, tiles=routing, gather=False)
    return results


def _check(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: Weight, down: Weight) -> None:
    sizes = (len(gate_up), 2 * down.shape[2], x.shape[1]), (len(gate_up), x.shape[1], down.shape[2])
    if (tuple(gate_up.shape), tuple(down.shape)) != sizes or not x.is_contiguous():
        raise ValueError(
            f"x {list(x.shape)} must be contiguous rows for experts {list(gate_up.shape)} and {list(down.shape)}"
        )
    if weights.shape != experts.shape or len(experts) != len(x) or not weights.is_contiguous():
        raise ValueError(f"weights {list(weights.shape)} and experts {list(experts.shape)} must have {len(x)} rows")
    if weights.dtype != torch.float32 or experts.dtype != torch.int64 or not experts.is_contiguous():
        raise ValueError(f"weights {weights.dtype} and experts {experts.dtype} must be rows of float32 and int64")


def experts_reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    limit: float | None = None,
    *,
    first: int,
    exact: bool,
) -> torch.Tensor:
    """Computes one expert after another, with `exact` or quantised activations."""

    def product(rows: torch.Tensor, matrix: Weight, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        one = matrix[expert : expert + 1]
        wide = rows.float() if exact else quantise_reference(rows).expanded()
        result = wide @ (one.float() if isinstance(one, torch.Tensor) else one.expanded())[0].T
        return (result if bias is None else result + bias[expert].float()).to(x.dtype)

    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(gate_up)):
        token, choice = (experts == first + expert).nonzero(as_tuple=True)
        both = product(x[token], gate_up, gate_up_bias, expert)
        gated = swiglu_reference(both) if limit is None else clamped_gate(both, limit)
        part = product(gated, down, down_bias, expert)
        result.index_add_(0, token, part.float() * weights[token, choice].float().unsqueeze(1))
    return result.to(x.dtype)


def plain_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    limit: float | None,
    *,
    first: int | None,
) -> torch.Tensor:
    """Experts with weights that are not quantised, in torch: one product per expert over its tokens.

    With `first`, this rank's experts start at this number, and all others are skipped. Tokens are sorted by expert, so
    that the tokens of an expert are adjacent, and put back in order afterwards.
    """
    per_token, elsewhere = experts.shape[1], None
    if first is not None:
        experts = experts - first
        elsewhere = (experts < 0) | (experts >= len(gate_up))
        experts.masked_fill_(elsewhere, len(gate_up))  # sorted after all experts of this rank, and skipped
    sorted_experts, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(len(gate_up), device=x.device)
    ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)  # end of each expert's tokens
    own = sorted_experts if first is None else sorted_experts.clamp_(max=len(gate_up) - 1)
    both = grouped_reference(x[order // per_token], gate_up.transpose(1, 2), ends)
    if gate_up_bias is not None:
        both += gate_up_bias[own]
    gated = swiglu(both) if limit is None else clamped_gate(both, limit)
    results = grouped_reference(gated, down.transpose(1, 2), ends)
    if down_bias is not None:
        results += down_bias[own]
    results = torch.empty_like(results).index_copy_(0, order, results).view(len(x), per_token, -1)
    if elsewhere is not None:
        results.masked_fill_(elsewhere.unsqueeze(-1), 0)
    return results.mul_(weights.unsqueeze(-1)).sum(dim=1)
