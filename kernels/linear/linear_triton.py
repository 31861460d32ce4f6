"""Triton kernel of linear.py: a program processes a block of weight rows, column block by column block.

The weights are the left operand of the matrix product, so that the few rows of x are its narrow side. Layers with few
outputs and many columns are computed by few_rows_triton.py, where several programs divide the columns (split-K). With
up to 16 rows on an H200, that takes 3.5 us instead of 4.8 for 128 x 2,048 weights, 8.0 instead of 9.3 for 2,048 x 4,096
and 11.4 instead of 17.9 for 1,536 x 8,960.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ..backends.occupancy import multiprocessors
from ..backends.overlap_triton import overlap_options, prefetch, start_next, wait_for_previous
from .few_rows_triton import launch_few_rows
from .swiglu_triton import activate

_WEIGHT_ROWS = 64
_COLUMNS = 128
_DIVIDED_ROWS, _DIVIDED_COLUMNS, _DIVIDED_SHARE = 16, 2048, 4
"""Several programs divide the columns (few_rows_triton.py) if there are at most `_DIVIDED_ROWS` rows and at least
`_DIVIDED_COLUMNS` columns, and if otherwise at most one of `_DIVIDED_SHARE` multiprocessors would have a program.
"""
_AHEAD = 512  # columns prefetched into L2 before the input is ready: 64 KiB per program


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    out_size,
    in_size,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    if GATED:
        # rows of gate and up alternate, so that one program has both rows of a pair, side by side
        half: tl.constexpr = WEIGHT_ROWS // 2
        index = tl.arange(0, WEIGHT_ROWS)
        output = tl.program_id(0) * half + tl.arange(0, half)
        inside = tl.program_id(0) * half + index // 2 < out_size
        number = tl.program_id(0) * half + index // 2 + (index % 2) * out_size
    else:
        output = tl.program_id(0) * WEIGHT_ROWS + tl.arange(0, WEIGHT_ROWS)
        inside = output < out_size
        number = output
    number = tl.where(inside, number, 0)
    weights = weight_ptr + number.to(tl.int64)[:, None] * in_size
    if OVERLAP:
        lines = weights + tl.arange(0, AHEAD // 64)[None, :] * 64
        prefetch(lines)
        wait_for_previous()
    inputs = x_ptr + row[:, None] * in_size + column[None, :]
    weights += column[None, :]
    acc = tl.zeros([WEIGHT_ROWS, ROWS], tl.float32)
    for first in range(0, in_size, COLUMNS):
        if WHOLE:
            weight = tl.load(weights + first)
            x = tl.load(inputs + first, mask=(row < rows)[:, None], other=0.0)
        else:
            left = first + column < in_size
            weight = tl.load(weights + first, mask=left[None, :], other=0.0)
            x = tl.load(inputs + first, mask=(row < rows)[:, None] & left[None, :], other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
    dtype = out_ptr.dtype.element_ty
    if BIAS:
        acc += tl.load(bias_ptr + number).to(tl.float32)[:, None]
    if GATED:
        pairs = tl.permute(tl.reshape(acc, [half, 2, ROWS]), [0, 2, 1])
        gate, up = tl.split(pairs)
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        result = activate(gate, GELU).to(dtype).to(tl.float32) * up
    else:
        result = acc
    out = out_ptr + row[None, :] * out_size + output[:, None]
    tl.store(out, result.to(dtype), mask=(row < rows)[None, :] & (output < out_size)[:, None])


def launch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    gated: bool,
    gelu: bool = False,
) -> None:
    rows, in_size = x.shape
    out_size = out.shape[1]
    narrow = x.dtype.itemsize == 2
    programs = triton.cdiv(len(weight), _WEIGHT_ROWS)
    idle = _DIVIDED_SHARE * programs <= multiprocessors(x.device)
    if narrow and not gated and rows <= _DIVIDED_ROWS and in_size >= _DIVIDED_COLUMNS and idle:
        launch_few_rows(x, weight, out, gated=False, bias=bias)
        return
    _linear[(programs,)](
        x,
        weight,
        bias,
        out,
        rows,
        out_size,
        in_size,
        GATED=gated,
        GELU=gelu,
        BIAS=bias is not None,
        ROWS=max(triton.next_power_of_2(rows), 16),
        WEIGHT_ROWS=_WEIGHT_ROWS,
        COLUMNS=_COLUMNS,
        WHOLE=in_size % _COLUMNS == 0,
        AHEAD=min(_AHEAD, 1 << max(in_size.bit_length() - 1, 6)),
        PRECISION="tf32" if narrow else "ieee",
        num_warps=4,
        num_stages=6 if narrow else 2,
        **overlap_options(x.device),
    )
