"""Triton kernel for many rows of x and fp8 weights, dense or of experts: multiplies quantised rows in fp8.

A program computes a tile of rows and 128 outputs, or 64 if these share a scale. Tensor cores add fp8 products with less
precision than float32, so they add only 128 columns at a time. That sum is scaled, by the scales of its row and block,
and added in float32. Weights with a scale per row are scaled after the last columns.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ...common.arithmetic import ceil_div
from ..backends.occupancy import shared_memory
from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from .few_rows_triton import find_rows
from .fp8_format import BLOCK, Fp8Matrix
from .quantise import QuantisedRows
from .row_tiles import RowTiles

_BLOCK = tl.constexpr(BLOCK)
_GROUPED_TILES = 8
"""Tiles of rows that are computed together for each block of outputs, so that the weights stay in L2."""
_WARPS = {16: 4, 32: 4, 64: 4, 128: 8}
"""By rows of a tile. With 128 rows, sums and products take half of the registers of 8 warps."""
_STAGES = 4


@triton.jit(do_not_specialize=["rows", "x_scale_stride"])
def _many_rows(
    x_ptr,
    x_scales_ptr,
    values_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    ends_ptr,
    expert_ptr,
    first_ptr,
    rows,
    out_size,
    in_size,
    x_scale_stride,
    row_groups,
    scale_stride,
    GROUPED: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILES: tl.constexpr,
    WHOLE: tl.constexpr,
    BY_ROW: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    blocks = (out_size + OUTPUTS - 1) // OUTPUTS
    row = tl.arange(0, ROWS)
    if GROUPED:
        tile = tl.program_id(0) // blocks
        block = tl.program_id(0) % blocks
        expert = tl.load(expert_ptr + tile)
        if expert < 0:
            return
        exists, source, target = find_rows(
            order_ptr, ends_ptr, first_ptr, tile, expert, row, PER_TOKEN, GATHER, SCATTER
        )
        values_ptr += expert.to(tl.int64) * out_size * in_size
        scales_ptr += expert.to(tl.int64) * row_groups * scale_stride
    else:
        tiles = (rows + ROWS - 1) // ROWS
        group = tl.program_id(0) // (TILES * blocks)
        together = tl.minimum(tiles - group * TILES, TILES)
        tile = group * TILES + tl.program_id(0) % (TILES * blocks) % together
        block = tl.program_id(0) % (TILES * blocks) // together
        target = tile * ROWS + row
        exists = target < rows
        source = tl.where(exists, target, 0)
    column = tl.arange(0, _BLOCK)
    output = block * OUTPUTS + tl.arange(0, OUTPUTS)
    number = tl.where(output < out_size, output, 0)
    inputs = x_ptr + source.to(tl.int64)[:, None] * in_size + column[None, :]
    weights = values_ptr + number.to(tl.int64)[None, :] * in_size + column[:, None]
    x_scales = x_scales_ptr + source
    scales = scales_ptr + (number // ROW_GROUP) * scale_stride
    scale_of_block = scales_ptr + block * scale_stride
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for at in range(0, in_size, _BLOCK):
        if WHOLE:
            x = tl.load(inputs + at)
            weight = tl.load(weights + at)
        else:
            left = at + column < in_size
            x = tl.load(inputs + at, mask=left[None, :], other=0.0)
            weight = tl.load(weights + at, mask=left[:, None], other=0.0)
        x_scale = tl.load(x_scales + at // _BLOCK * x_scale_stride)
        if BY_ROW:
            acc += tl.dot(x, weight) * x_scale[:, None]
        elif ROW_GROUP == OUTPUTS:
            acc += tl.dot(x, weight) * (x_scale * tl.load(scale_of_block + at // _BLOCK))[:, None]
        else:
            acc += tl.dot(x, weight) * x_scale[:, None] * tl.load(scales + at // _BLOCK)[None, :]
    if BY_ROW:
        acc *= tl.load(scales)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + number).to(tl.float32)[None, :]
    out = out_ptr + target.to(tl.int64)[:, None] * out_size + output[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=exists[:, None] & (output < out_size)[None, :])


def launch_many_rows(
    x: QuantisedRows,
    weight: Fp8Matrix,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    tiles: RowTiles | None = None,
    gather: bool = False,
) -> None:
    """Fill `out` [rows, outputs]: for all rows of x, or for the rows of `tiles`, without a bias. RowTiles describes
    `gather`.
    """
    *_, out_size, in_size = weight.shape
    outputs = 64 if weight.row_group == 64 else 128
    rows = (128 if x.rows > 64 * 16 else 64) if tiles is None else tiles.rows
    row_tiles = ceil_div(x.rows, rows) if tiles is None else len(tiles.expert)
    if len(out) == 0:
        return
    _many_rows[(row_tiles * ceil_div(out_size, outputs),)](
        x.values,
        x.scales,
        weight.values,
        weight.scales,
        bias,
        out,
        *((None,) * 4 if tiles is None else (tiles.order, tiles.ends, tiles.expert, tiles.first)),
        x.rows,
        out_size,
        in_size,
        0 if x.by_row else x.scales.stride(1),
        *weight.scales.shape[-2:],
        GROUPED=tiles is not None,
        GATHER=gather,
        SCATTER=tiles is not None and not gather,
        PER_TOKEN=1 if tiles is None else tiles.per_token,
        ROW_GROUP=weight.row_group,
        ROWS=rows,
        OUTPUTS=outputs,
        TILES=_GROUPED_TILES,
        WHOLE=in_size % BLOCK == 0,
        BY_ROW=weight.by_row,
        BIAS=bias is not None,
        num_warps=_WARPS[rows],
        num_stages=min(_STAGES, shared_memory(out.device) // ((rows + outputs) * BLOCK)),
        **overlap_options(out.device),
    )
