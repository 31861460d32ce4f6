"""Triton kernel of experts.py: copies the rows of tokens into the order of experts, several per program."""
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
