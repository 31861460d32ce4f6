"""Triton kernels of experts.py. One copies the rows of tokens into the order of experts, several rows per program. The
other adds the weighted results of a token's experts.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from ..linear.row_tiles import RowTiles

_ROWS = 8
_COLUMNS = 1024


@triton.jit(do_not_specialize=["last"])
def _gather(
    x_ptr,
    order_ptr,
    ends_ptr,
    out_ptr,
    last,
    size,
    PER_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = row < tl.load(ends_ptr + last)
    token = tl.load(order_ptr + row, mask=exists, other=0) // PER_TOKEN
    inside = exists[:, None] & (column < size)[None, :]
    values = tl.load(x_ptr + token.to(tl.int64)[:, None] * size + column[None, :], mask=inside)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * size + column[None, :], values, mask=inside)


def launch_gather(x: torch.Tensor, routing: RowTiles, out: torch.Tensor) -> None:
    """Fill the rows of `out` [T * k, hidden] that belong to experts of this rank."""
    numbers, size = out.shape
    if numbers == 0:
        return
    block = min(_COLUMNS, triton.next_power_of_2(size))
    _gather[(triton.cdiv(numbers, _ROWS), triton.cdiv(size, block))](
        x,
        routing.order,
        routing.ends,
        out,
        len(routing.ends) - 1,
        size,
        PER_TOKEN=routing.per_token,
        ROWS=_ROWS,
        BLOCK=block,
        num_warps=4,
        **overlap_options(out.device),
    )


@triton.jit(do_not_specialize=["first"])
def _weighted_sum(
    results_ptr,
    weights_ptr,
    experts_ptr,
    place_ptr,
    shared_ptr,
    out_ptr,
    first,
    count,
    size,
    PLACED: tl.constexpr,
    SHARED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        number = token * PER_TOKEN + choice
        expert = tl.load(experts_ptr + number) - first
        here = (expert >= 0) & (expert < count)
        weight = tl.load(weights_ptr + number).to(tl.float32)
        row = tl.load(place_ptr + number, mask=here, other=0).to(tl.int64) if PLACED else number
        result = tl.load(results_ptr + row * size + column, mask=(column < size) & here, other=0.0)
        acc += weight * result.to(tl.float32)
    out = out_ptr + token * size + column
    dtype = out_ptr.dtype.element_ty
    if SHARED:
        shared = tl.load(shared_ptr + token * size + column, mask=column < size, other=0.0)
        acc = acc.to(dtype).to(tl.float32) + shared.to(tl.float32)
    tl.store(out, acc.to(dtype), mask=column < size)


def launch_weighted_sum(
    results: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    first: int,
    count: int,
    out: torch.Tensor,
    *,
    place: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
) -> None:
    """Fill `out` [T, hidden] from `results` [T * k, hidden]; only the rows of this rank's experts are read. The result
    of number i (routing.py) is in row i or, with `place`, in row place[i]. `shared` [T, hidden] is added to the rounded
    sum.
    """
    tokens, size = out.shape
    if tokens == 0:
        return
    block = min(1024, triton.next_power_of_2(size))
    _weighted_sum[(tokens, triton.cdiv(size, block))](
        results,
        weights,
        experts,
        place,
        shared,
        out,
        first,
        count,
        size,
        PLACED=place is not None,
        SHARED=shared is not None,
        PER_TOKEN=experts.shape[1],
        BLOCK=block,
        num_warps=4,
        **overlap_options(out.device),
    )
