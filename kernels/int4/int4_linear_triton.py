"""Triton kernel of int4_linear.py: reads the packed weights once for each tile of rows.

A program has a block of weight rows (outputs), a tile of rows of x, and a range of columns. A step of its loop reads
the bytes of one pair of groups and computes two products: of the low halves with the columns of the first group, and of
the high halves with those of the second. Where there are too few blocks to keep the GPU busy, several programs divide
the columns (backends/split_sums_triton.py).

The weights are the right operand. Up to 32 rows, both operands of a product are in registers: weights go from shared
memory to registers as bytes, 4 at a time. For more rows, Triton writes expanded weights to shared memory.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803  (compile-time parameters are written in capitals)

import torch
import triton
import triton.language as tl

from ...configs.arithmetic import ceil_div
from ..backends.few_rows_cuda import Tiles
from ..backends.occupancy import counters_of, multiprocessors, shared_memory
from ..backends.overlap_triton import overlap_options, prefetch, start_next, wait_for_previous
from ..backends.split_sums_triton import add_parts, store_part
from .group_format import GroupScaled
from .int4_linear import WIDE_BYTES
from .unpack_triton import unpack

STAGE_BYTES = 48 << 10
"""Shared memory of a program for loads in flight: four programs of few rows fit a multiprocessor."""
_AHEAD = 512
"""Bytes of each weight row prefetched into L2 before the input is ready."""
_LEAST_BLOCKS = 2
"""Pairs of groups of a program, at least, if columns are divided."""
_PROGRAMS = 4
"""Programs per multiprocessor to aim at."""


@triton.jit
def _store_result(
    acc,
    bias_ptr,
    out_ptr,
    out_size,
    number,
    target,
    exists,
    output,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    if BIAS:
        acc += tl.load(bias_ptr + number).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, [ROWS, OUTPUTS // 2, 2]))
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        acc = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    out = out_ptr + target.to(tl.int64)[:, None] * out_size + output[None, :]
    tl.store(out, acc.to(dtype), mask=exists[:, None] & (output < out_size)[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def _int4_linear(
    x_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    counters_ptr,
    rows,
    out_size,
    in_size,
    row_bytes,
    group_stride,
    splits,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
    split = tl.program_id(2)
    index = tl.arange(0, OUTPUTS)
    if GATED:
        # rows of gate and up alternate, so that one program has both rows of a pair, side by side
        half: tl.constexpr = OUTPUTS // 2
        output = tl.program_id(0) * half + tl.arange(0, half)
        pair = tl.program_id(0) * half + index // 2
        number = tl.where(pair < out_size, pair + (index % 2) * out_size, 0)
    else:
        output = tl.program_id(0) * OUTPUTS + index
        number = tl.where(output < out_size, output, 0)
    blocks = row_bytes // GROUP
    share = (blocks + splits - 1) // splits
    begin = split * share
    end = tl.minimum(begin + share, blocks)
    weights = packed_ptr + number.to(tl.int64)[None, :] * row_bytes
    if OVERLAP:
        prefetch(weights + begin * GROUP + tl.arange(0, AHEAD // 128)[:, None] * 128)
        wait_for_previous()
    column = tl.arange(0, GROUP)
    target = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = target < rows
    inputs = x_ptr + tl.where(exists, target, 0).to(tl.int64)[:, None] * in_size + column[None, :]
    weights += column[:, None]
    group = 2 * begin * group_stride + number
    low_scales, low_zeros = tl.load(scales_ptr + group), tl.load(zeros_ptr + group)
    group += group_stride
    high_scales, high_zeros = tl.load(scales_ptr + group), tl.load(zeros_ptr + group)
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for block in range(begin, end):
        packed = tl.load(weights + block * GROUP)
        first = inputs + block * (2 * GROUP)
        low_x = tl.load(first, mask=exists[:, None], other=0.0)
        if WHOLE:
            high_x = tl.load(first + GROUP, mask=exists[:, None], other=0.0)
        else:
            left = block * (2 * GROUP) + GROUP < in_size
            high_x = tl.load(first + GROUP, mask=exists[:, None] & left, other=0.0)
        # those of the next step, or of this one again: their latency passes while the products are computed
        group = 2 * tl.minimum(block + 1, end - 1) * group_stride + number
        next_low_scales, next_low_zeros = tl.load(scales_ptr + group), tl.load(zeros_ptr + group)
        group += group_stride
        next_high_scales, next_high_zeros = tl.load(scales_ptr + group), tl.load(zeros_ptr + group)
        low, high = unpack(packed, low_zeros, high_zeros)
        acc += tl.dot(low_x, low, input_precision=PRECISION) * low_scales.to(tl.float32)[None, :]
        acc += tl.dot(high_x, high, input_precision=PRECISION) * high_scales.to(tl.float32)[None, :]
        low_scales, low_zeros = next_low_scales, next_low_zeros
        high_scales, high_zeros = next_high_scales, next_high_zeros
    if SPLIT:
        place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if store_part(acc, sums_ptr, counters_ptr, place, split, splits, ROWS, OUTPUTS):
            total = add_parts(sums_ptr, place, splits, ROWS, OUTPUTS)
            _store_result(
                total, bias_ptr, out_ptr, out_size, number, target, exists, output, GATED, BIAS, ROWS, OUTPUTS
            )
    else:
        _store_result(acc, bias_ptr, out_ptr, out_size, number, target, exists, output, GATED, BIAS, ROWS, OUTPUTS)


def launch_int4_linear(
    x: torch.Tensor,
    weight: GroupScaled,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    gated: bool,
    tiles: Tiles | None = None,
) -> None:
    """Fill `out` [rows, outputs]."""
    tiles = tiles or Tiles()
    group, row_bytes = weight.group, weight.packed.shape[1]
    most = 64 if shared_memory(x.device) >= WIDE_BYTES else 32
    rows = min(max(triton.next_power_of_2(len(x)), 16), most)
    outputs = tiles.outputs or (64 if rows <= 32 else 128)
    row_tiles, blocks, pairs = ceil_div(len(x), rows), ceil_div(len(weight), outputs), row_bytes // group
    if tiles.splits is None:
        splits = column_splits(blocks * row_tiles, pairs, x.device)
    else:
        splits = ceil_div(pairs, ceil_div(pairs, tiles.splits))
    sums = counters = out  # not read
    if splits > 1:
        sums = torch.empty(blocks * row_tiles * splits * rows * outputs, dtype=torch.float32, device=x.device)
        counters = counters_of(x.device)
        assert blocks * row_tiles <= len(counters)
    stage = outputs * group + 2 * rows * group * x.itemsize
    stages = tiles.stages or min(8, min(STAGE_BYTES, shared_memory(x.device)) // stage, ceil_div(pairs, splits))
    _int4_linear[(blocks, row_tiles, splits)](
        x,
        weight.packed,
        weight.scales,
        weight.zeros,
        bias,
        out,
        sums,
        counters,
        len(x),
        out.shape[1],
        weight.columns,
        row_bytes,
        weight.scales.stride(0),
        splits,
        GATED=gated,
        BIAS=bias is not None,
        GROUP=group,
        ROWS=rows,
        OUTPUTS=outputs,
        SPLIT=splits > 1,
        WHOLE=weight.columns == 2 * row_bytes,
        AHEAD=min(_AHEAD, 1 << max(row_bytes.bit_length() - 1, 7)),
        PRECISION="tf32" if x.itemsize == 2 else "ieee",
        num_warps=tiles.warps or (2 if rows <= 32 else 8),
        num_stages=max(2, stages),
        **overlap_options(x.device),
    )


def column_splits(blocks: int, pairs: int, device: torch.device) -> int:
    """Programs that divide the columns: enough to keep all multiprocessors busy, each with columns."""
    wanted = _PROGRAMS * multiprocessors(device) // blocks
    splits = max(1, min(wanted, pairs // _LEAST_BLOCKS))
    return ceil_div(pairs, ceil_div(pairs, splits))
