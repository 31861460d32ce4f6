"""Triton kernels of float_linear.py.

For up to 8 rows of x, a program computes one row of weights, and adds the columns at the end. For more rows, it
computes a block of weight rows for a tile of rows of x, over a range of columns. If there are too few blocks to keep
the GPU busy, several programs divide the columns (split-K, backends/split_sums_triton.py). x in bfloat16 is multiplied
on tensor cores: each float32 weight is split into three bfloat16 whose sum has all its 24 bits, so every product is
exact, and products are added in float32. Other x are multiplied in float32, without tensor cores.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ...common.arithmetic import ceil_div
from ..backends.occupancy import counters_of, multiprocessors
from ..backends.overlap_triton import overlap_options, prefetch, start_next, wait_for_previous
from ..backends.split_sums_triton import add_parts, store_part

_FEW_ROWS, _FEW_ROWS_COLUMNS = 8, 1024
_OUTPUTS = 32
_MOST_ROWS = 128
"""Rows of x of a program."""
_PROGRAMS = 2
"""Programs per multiprocessor to aim at."""
_LINE = tl.constexpr(32)
"""Weights in a line of the L2 cache."""


@triton.jit(do_not_specialize=["rows"])
def _float_linear_few(
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
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.static_range(0, IN_SIZE, COLUMNS):  # unrolled: loads of several iterations overlap
        inside = first + column < IN_SIZE
        weight = tl.load(weight_ptr + output * IN_SIZE + first + column, mask=inside, other=0.0)
        mask = (row < rows)[:, None] & inside[None, :]
        x = tl.load(x_ptr + row[:, None] * IN_SIZE + first + column[None, :], mask=mask, other=0.0)
        acc += x.to(tl.float32) * weight[None, :]
    tl.store(out_ptr + row * out_size + output, tl.sum(acc, 1), mask=row < rows)


@triton.jit(do_not_specialize=["rows", "splits"])
def _float_linear(
    x_ptr,
    weight_ptr,
    out_ptr,
    sums_ptr,
    counters_ptr,
    rows,
    out_size,
    in_size,
    splits,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    column = tl.arange(0, COLUMNS)
    exists = row < rows
    share = ((in_size + COLUMNS - 1) // COLUMNS + splits - 1) // splits * COLUMNS
    begin = split * share
    end = tl.minimum(begin + share, in_size)
    weights = weight_ptr + tl.where(output < out_size, output, 0).to(tl.int64)[:, None] * in_size
    if OVERLAP:
        start_next()
        prefetch(weights + tl.minimum(begin + tl.arange(0, COLUMNS // _LINE) * _LINE, in_size - 1)[None, :])
        wait_for_previous()
    inputs = x_ptr + row.to(tl.int64)[:, None] * in_size
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for first in range(begin, end, COLUMNS):
        inside = (first + column < end)[None, :]
        weight = tl.load(weights + first + column[None, :], mask=inside, other=0.0)
        x = tl.trans(tl.load(inputs + first + column[None, :], mask=exists[:, None] & inside, other=0.0))
        if x.dtype == tl.bfloat16:
            high = weight.to(tl.bfloat16)
            rest = weight - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(low, x, acc)
            acc = tl.dot(middle, x, acc)
            acc = tl.dot(high, x, acc)
        else:
            acc = tl.dot(weight, x.to(tl.float32), acc, input_precision="ieee")
    out = out_ptr + row.to(tl.int64)[None, :] * out_size + output[:, None]
    mask = exists[None, :] & (output < out_size)[:, None]
    if SPLIT:
        block = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if store_part(acc, sums_ptr, counters_ptr, block, split, splits, OUTPUTS, ROWS):
            tl.store(out, add_parts(sums_ptr, block, splits, OUTPUTS, ROWS), mask=mask)
    else:
        tl.store(out, acc, mask=mask)


def launch_float_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` [rows, out]."""
    rows, in_size = x.shape
    if rows == 0:
        return
    if rows <= _FEW_ROWS:
        _float_linear_few[(len(weight),)](
            x,
            weight,
            out,
            rows,
            len(weight),
            IN_SIZE=in_size,
            ROWS=triton.next_power_of_2(rows),
            COLUMNS=min(_FEW_ROWS_COLUMNS, triton.next_power_of_2(in_size)),
            num_warps=8,
            **overlap_options(x.device),
        )
        return
    row_block = max(16, min(triton.next_power_of_2(rows), _MOST_ROWS))
    blocks, row_tiles = ceil_div(len(weight), _OUTPUTS), ceil_div(rows, row_block)
    columns = 64 if row_block <= 64 else 128
    wanted = _PROGRAMS * multiprocessors(x.device) // (blocks * row_tiles)
    splits = max(1, min(wanted, ceil_div(in_size, columns) // 2))
    sums = counters = out  # not read
    if splits > 1:
        sums = out.new_empty(blocks * row_tiles * splits * _OUTPUTS * row_block)
        counters = counters_of(x.device)
    _float_linear[(blocks, row_tiles, splits)](
        x,
        weight,
        out,
        sums,
        counters,
        rows,
        len(weight),
        in_size,
        splits,
        ROWS=row_block,
        OUTPUTS=_OUTPUTS,
        COLUMNS=columns,
        SPLIT=splits > 1,
        num_warps=4 if row_block <= 64 else 8,
        num_stages=3,
        **overlap_options(x.device),
    )
