"""Triton kernel of float_linear.py: a program has one row of weights and a few rows of x, and sums columns last."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803  (compile-time parameters are written in capitals)

import torch
import triton
import triton.language as tl

from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous

_ROWS = 16
_COLUMNS = 1024


@triton.jit(do_not_specialize=["rows"])
def _float_linear(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    out_size,
    IN_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    output = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.static_range(0, IN_SIZE, COLUMNS):  # unrolled: loads of several iterations overlap
        inside = first + column < IN_SIZE
        weight = tl.load(weight_ptr + output * IN_SIZE + first + column, mask=inside, other=0.0)
        mask = (row < rows)[:, None] & inside[None, :]
        x = tl.load(x_ptr + row[:, None] * IN_SIZE + first + column[None, :], mask=mask, other=0.0)
        acc += x.to(tl.float32) * weight[None, :]
    tl.store(out_ptr + row * out_size + output, tl.sum(acc, 1), mask=row < rows)


def launch_float_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` [rows, out]."""
    rows, in_size = x.shape
    if rows == 0:
        return
    row_block = min(triton.next_power_of_2(rows), _ROWS)
    _float_linear[(len(weight), triton.cdiv(rows, row_block))](
        x,
        weight,
        out,
        rows,
        len(weight),
        IN_SIZE=in_size,
        ROWS=row_block,
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(in_size)),
        num_warps=8,
        **overlap_options(x.device),
    )
