"""Triton kernel for experts with 4-bit weights (packed4/group_format.py), for any number of tokens.

A program computes a block of weight rows (outputs) of one expert for a tile of its tokens (routing.py), over a range of
columns. A step of its loop reads the bytes of one pair of groups, and computes and scales two products: the low halves
of the bytes with the columns of the first group, and the high halves with the columns of the second. If there are few
programs, several divide the columns (split-K, backends/split_sums_triton.py). Weights are never expanded in memory:
each tile unpacks them again in registers, and the later tiles of an expert read them from the L2 cache.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ...common.arithmetic import ceil_div
from ..backends.occupancy import counters_of, multiprocessors, shared_memory
from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from ..backends.split_sums_triton import add_parts, store_part
from ..linear.few_rows_triton import find_rows
from ..linear.row_tiles import RowTiles
from ..packed4.group_format import GroupScaled
from ..packed4.unpack_triton import factors, unpack, unpack_e2m1
from .clamped_gate import ALPHA

_ALPHA = tl.constexpr(ALPHA)
_STAGE_BYTES = 48 << 10
"""Shared memory of a program for loads in flight: four programs of few rows fit a multiprocessor."""
_LEAST_BLOCKS = 2
"""Pairs of groups of a program, at least, if columns are divided."""
_PROGRAMS = 4
"""Programs per multiprocessor to aim at."""


@triton.jit
def store_result(
    acc,
    bias_ptr,
    out_ptr,
    out_size,
    limit,
    number,
    target,
    exists,
    output,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
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
        if CLAMPED:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
            acc = (up + 1.0) * (gate / (1.0 + tl.exp(-gate * _ALPHA)))
        else:
            acc = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    out = out_ptr + target.to(tl.int64)[:, None] * out_size + output[None, :]
    tl.store(out, acc.to(dtype), mask=exists[:, None] & (output < out_size)[None, :])


@triton.jit(do_not_specialize=["splits"])
def _packed_experts(
    x_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    counters_ptr,
    order_ptr,
    ends_ptr,
    expert_ptr,
    first_ptr,
    weight_rows,
    out_size,
    in_size,
    row_bytes,
    groups,
    limit,
    splits,
    MXFP4: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    BIAS: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    tile = tl.program_id(1)
    split = tl.program_id(2)
    expert = tl.load(expert_ptr + tile)
    if expert < 0:
        return
    exists, source, target = find_rows(
        order_ptr, ends_ptr, first_ptr, tile, expert, tl.arange(0, ROWS), PER_TOKEN, GATHER, SCATTER
    )
    index = tl.arange(0, OUTPUTS)
    if GATED:
        # rows of gate and up alternate in a program; with the clamped gate they alternate in memory, too
        half: tl.constexpr = OUTPUTS // 2
        output = tl.program_id(0) * half + tl.arange(0, half)
        pair = tl.program_id(0) * half + index // 2
        row = 2 * pair + index % 2 if CLAMPED else pair + (index % 2) * out_size
        number = tl.where(pair < out_size, row, 0)
    else:
        output = tl.program_id(0) * OUTPUTS + index
        number = tl.where(output < out_size, output, 0)
    blocks = row_bytes // GROUP
    share = (blocks + splits - 1) // splits
    begin = split * share
    end = tl.minimum(begin + share, blocks)
    column = tl.arange(0, GROUP)
    packed_ptr += expert.to(tl.int64) * weight_rows * row_bytes
    scales_ptr += expert.to(tl.int64) * groups * weight_rows
    if not MXFP4:
        zeros_ptr += expert.to(tl.int64) * groups * weight_rows
    if BIAS:
        bias_ptr += expert.to(tl.int64) * weight_rows
    weights = packed_ptr + number.to(tl.int64)[None, :] * row_bytes + column[:, None]
    inputs = x_ptr + source.to(tl.int64)[:, None] * in_size + column[None, :]
    group = 2 * begin * weight_rows + number
    low_scales, high_scales = tl.load(scales_ptr + group), tl.load(scales_ptr + group + weight_rows)
    if not MXFP4:
        low_zeros, high_zeros = tl.load(zeros_ptr + group), tl.load(zeros_ptr + group + weight_rows)
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
        # prefetch the scales of the next step (of this one in the last step) while the products are computed
        group = 2 * tl.minimum(block + 1, end - 1) * weight_rows + number
        next_low_scales, next_high_scales = tl.load(scales_ptr + group), tl.load(scales_ptr + group + weight_rows)
        if MXFP4:
            low, high = unpack_e2m1(packed, low_x.dtype)
        else:
            low, high = unpack(packed, low_zeros, high_zeros)
            low_zeros, high_zeros = tl.load(zeros_ptr + group), tl.load(zeros_ptr + group + weight_rows)
        acc += tl.dot(low_x, low, input_precision=PRECISION) * factors(low_scales, MXFP4)[None, :]
        acc += tl.dot(high_x, high, input_precision=PRECISION) * factors(high_scales, MXFP4)[None, :]
        low_scales, high_scales = next_low_scales, next_high_scales
    if SPLIT:
        place = tile * tl.num_programs(0) + tl.program_id(0)
        if store_part(acc, sums_ptr, counters_ptr, place, split, splits, ROWS, OUTPUTS):
            total = add_parts(sums_ptr, place, splits, ROWS, OUTPUTS)
            store_result(
                total,
                bias_ptr,
                out_ptr,
                out_size,
                limit,
                number,
                target,
                exists,
                output,
                GATED,
                CLAMPED,
                BIAS,
                ROWS,
                OUTPUTS,
            )
    else:
        store_result(
            acc,
            bias_ptr,
            out_ptr,
            out_size,
            limit,
            number,
            target,
            exists,
            output,
            GATED,
            CLAMPED,
            BIAS,
            ROWS,
            OUTPUTS,
        )


def launch_packed_experts(
    x: torch.Tensor,
    weight: GroupScaled,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    gated: bool,
    limit: float | None,
    tiles: RowTiles,
    gather: bool,
) -> None:
    """Fill the rows of `tiles`, at most 64 each, in `out` [rows, outputs]; RowTiles describes `gather`. With `gated`,
    the gate is applied to the products; with `limit`, it is that of clamped_gate.py.
    """
    if len(out) == 0:
        return
    _, weight_rows, row_bytes = weight.packed.shape
    group, rows = weight.group, max(16, tiles.rows)
    outputs = 64 if rows <= 32 else 128
    blocks, row_tiles, pairs = ceil_div(weight_rows, outputs), len(tiles.expert), row_bytes // group
    splits = column_splits(blocks * row_tiles, pairs, x.device)
    sums = counters = out  # not read
    if splits > 1:
        sums = torch.empty(blocks * row_tiles * splits * rows * outputs, dtype=torch.float32, device=x.device)
        counters = counters_of(x.device)
        assert blocks * row_tiles <= len(counters)
    stage = outputs * group + 2 * rows * group * x.itemsize
    stages = min(8, min(_STAGE_BYTES, shared_memory(x.device)) // stage, ceil_div(pairs, splits))
    _packed_experts[(blocks, row_tiles, splits)](
        x,
        weight.packed,
        weight.scales,
        weight.zeros,
        bias,
        out,
        sums,
        counters,
        tiles.order,
        tiles.ends,
        tiles.expert,
        tiles.first,
        weight_rows,
        out.shape[1],
        weight.columns,
        row_bytes,
        weight.scales.shape[1],
        0.0 if limit is None else limit,
        splits,
        MXFP4=weight.zeros is None,
        GATED=gated,
        CLAMPED=limit is not None,
        BIAS=bias is not None,
        GATHER=gather,
        SCATTER=not gather,
        PER_TOKEN=tiles.per_token,
        GROUP=group,
        ROWS=rows,
        OUTPUTS=outputs,
        SPLIT=splits > 1,
        WHOLE=weight.columns == 2 * row_bytes,
        PRECISION="tf32" if x.itemsize == 2 else "ieee",
        num_warps=2 if rows <= 32 else 8,
        num_stages=max(2, stages),
        **overlap_options(x.device),
    )


def column_splits(blocks: int, pairs: int, device: torch.device) -> int:
    """The number of programs that divide the columns: enough to keep all multiprocessors busy, but each has columns."""
    wanted = _PROGRAMS * multiprocessors(device) // blocks
    splits = max(1, min(wanted, pairs // _LEAST_BLOCKS))
    return ceil_div(pairs, ceil_div(pairs, splits))
