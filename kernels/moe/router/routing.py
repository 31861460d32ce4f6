"""Sorts tokens by expert and divides each expert's tokens into tiles, which a grouped product computes one by one.

    number    =  token * k + choice                    for every pair of a token and one of its k experts
    order     =  the numbers of this rank's experts, by expert, then ascending
    place     =  the index of each number in `order`
    tiles     =  ranges of at most `rows` of `order` within one expert

Shapes: experts [T, k] int64. The host does not wait for the device: tensors have room for the largest possible number
of tiles, and unused tiles have the expert -1.
"""

import torch

from ...backends.dispatch import Impl, launcher, use_triton
from ...linear.row_tiles import RowTiles
from .select_route_cuda import launch_select_route, suits_select_route
from .selection import SelectionRule, check_logits, empty_selection, select_experts


def most_tiles(numbers: int, experts: int, rows: int) -> int:
    """The most tiles of `rows` rows that any distribution of `numbers` among the experts needs."""
    busy = min(numbers, experts)
    return busy + (numbers - busy) // rows


def route_reference(experts: torch.Tensor, first: int, count: int, rows: int) -> RowTiles:
    flat = experts.flatten() - first
    here = (flat >= 0) & (flat < count)
    order = torch.where(here, flat, count).argsort(stable=True)
    sizes = torch.bincount(flat[here], minlength=count)
    ends = sizes.cumsum(0)
    tiles = [
        (expert, begin)
        for expert, (size, end) in enumerate(zip(sizes.tolist(), ends.tolist(), strict=True))
        for begin in range(end - size, end, rows)
    ]
    used = len(tiles)
    tiles += [(-1, 0)] * (most_tiles(flat.numel(), count, rows) - used)
    table = torch.tensor(tiles, dtype=torch.int32, device=experts.device).view(-1, 2)
    tile_expert, tile_first = table.t().contiguous()
    counts = torch.tensor([used, 0, 0], dtype=torch.int32, device=experts.device)
    places = order.argsort().int()
    return RowTiles(order.int(), places, ends.int(), tile_expert, tile_first, counts, rows, experts.shape[1])


def route_tokens(experts: torch.Tensor, first: int, count: int, rows: int, *, impl: Impl = "auto") -> RowTiles:
    """The tokens of the `count` experts from `first` on, in tiles of at most `rows`; see the module docstring."""
    if experts.dtype != torch.int64 or experts.ndim != 2 or not experts.is_contiguous():
        raise ValueError(f"experts {experts.dtype} {list(experts.shape)} must be contiguous rows of int64")
    if not use_triton(impl, experts.device):
        return route_reference(experts, first, count, rows)
    routing = _empty_tiles(experts, count, rows)
    if experts.numel():
        launcher("moe.router.routing_triton", "launch_route")(experts, first, count, routing)
    else:
        routing.ends.zero_()
        routing.counts.zero_()
    return routing


def select_and_route(
    logits: torch.Tensor, bias: torch.Tensor | None, rule: SelectionRule, first: int, count: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor, RowTiles]:
    """The weights and experts of each token, as `select_experts` returns them, and the tiles of `route_tokens`. On a
    GPU, one kernel computes both for few tokens.
    """
    check_logits(logits, bias)
    if not suits_select_route(logits, rule):
        weights, experts = select_experts(logits, bias, rule)
        return weights, experts, route_tokens(experts, first, count, rows)
    weights, experts = empty_selection(logits, rule)
    routing = _empty_tiles(experts, count, rows)
    launch_select_route(logits, bias, weights, experts, routing, rule, first=first)
    return weights, experts, routing


def _empty_tiles(experts: torch.Tensor, count: int, rows: int) -> RowTiles:
    numbers, tiles = experts.numel(), most_tiles(experts.numel(), count, rows)
    # separate allocations: for pointers of a different alignment, Triton would compile its kernels again
    sizes = numbers, numbers, count, tiles, tiles, 3
    order, place, ends, expert, first, counts = (
        torch.empty(size, dtype=torch.int32, device=experts.device) for size in sizes
    )
    return RowTiles(order, place, ends, expert, first, counts, rows, experts.shape[1])
