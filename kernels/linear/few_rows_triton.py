"""Triton kernel for few rows of x and fp8 weights, or the plain weights of experts; it reads the weights once.

A program computes a block of weight rows for a tile of rows of x, over a range of columns. The weights are the left
operand of the matrix product, so that the few rows of x are its narrow side. If there are too few blocks to keep the
GPU busy, several programs divide the columns (split-K, backends/split_sums_triton.py).

fp8 weights are multiplied in one of two ways. Linear layers convert the weights to the dtype of x in registers. With
experts, every multiprocessor is busy, and converting the weights would take longer than reading them. There x, which
has fewer rows, is split into the sum of two fp8 values, and each is multiplied with the fp8 weights. The two values
keep all bits of a bfloat16 (`_two_parts`); tensor cores add the products of 128 columns with about 14 bits, as in
many_rows_triton.py.

With experts, a tile has rows of one expert (moe/router/routing.py says which): `gather` reads the tokens of x in the
order of experts, `scatter` writes results in the order of tokens.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ...common.arithmetic import ceil_div
from ..backends.occupancy import counters_of, multiprocessors, shared_memory
from ..backends.overlap_triton import overlap_options, prefetch, start_next, wait_for_previous
from ..backends.split_sums_triton import add_parts, store_part
from .fp8_format import BLOCK, Fp8Matrix, Weight
from .row_tiles import RowTiles

_BLOCK = tl.constexpr(BLOCK)
_WEIGHT_ROWS, _STAGE_BYTES = 64, 90 << 10
"""Weight rows of a program, and its shared memory for loads in flight: two programs fit on a multiprocessor."""
_SPLIT_WEIGHT_ROWS, _SPLIT_STAGE_BYTES = 128, 60 << 10
"""The same where x is split into two parts."""
_AHEAD = 512
"""Columns prefetched into L2 before the input is ready."""
_LEAST_GROUPS = 4
"""The fewest groups of columns of a program, if programs divide the columns."""


@triton.jit
def find_rows(
    order_ptr,
    ends_ptr,
    first_ptr,
    tile,
    expert,
    row,
    PER_TOKEN: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
):
    """Which rows of a tile exist, and their rows of x and of the result."""
    position = tl.load(first_ptr + tile) + row
    exists = position < tl.load(ends_ptr + expert)
    number = tl.load(order_ptr + position, mask=exists, other=0)
    source = number // PER_TOKEN if GATHER else tl.where(exists, position, 0)
    target = number if SCATTER else position
    return exists, source, target


@triton.jit
def _converted(fp8, dtype: tl.constexpr):
    """fp8 in another dtype. The conversion to bf16 goes through float32: a GPU converts only 16 elements per cycle from
    fp16 to bf16, fewer than its memory delivers.
    """
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 both;
            .reg .b16 low, high;
            .reg .f32 first, second;
            cvt.rn.f16x2.e4m3x2 both, $1;
            mov.b32 {low, high}, both;
            cvt.f32.f16 first, low;
            cvt.f32.f16 second, high;
            cvt.rn.bf16x2.f32 $0, second, first;
            }""",
            "=r,h",
            [fp8],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:  # noqa: RET505 - the other branch is not compiled
        return fp8.to(dtype)


@triton.jit
def _two_parts(x):
    """Rows of bfloat16 as (high + low / 16) * scale, with high and low in fp8.

    The scale is a power of two, so that high has the first four significant bits of a value and low the other four. It
    makes the largest value of a row 128 to 256: values below 2^-14 of that are subnormal in fp8 and lose bits.
    """
    wide = x.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), 1), 1e-30)
    scale = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * (1.0 / 128)
    scaled = wide * (1.0 / scale)[:, None]
    high = scaled.to(tl.float8e4nv)
    low = ((scaled - high.to(tl.float32)) * 16).to(tl.float8e4nv)
    return high, low, scale


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
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    if BIAS:
        acc += tl.load(bias_ptr + number).to(tl.float32)[:, None]
    if GATED:
        pairs = tl.permute(tl.reshape(acc, [HALF, 2, ROWS]), [0, 2, 1])
        gate, up = tl.split(pairs)
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        acc = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    out = out_ptr + target.to(tl.int64)[None, :] * out_size + output[:, None]
    tl.store(out, acc.to(dtype), mask=exists[None, :] & (output < out_size)[:, None])


@triton.jit(do_not_specialize=["rows", "splits"])
def _few_rows(
    x_ptr,
    values_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    counters_ptr,
    order_ptr,
    ends_ptr,
    expert_ptr,
    first_ptr,
    rows,
    weight_rows,
    out_size,
    in_size,
    row_groups,
    scale_stride,
    splits,
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    GROUPED: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
    TWO_PARTS: tl.constexpr,
    BY_ROW: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
    tile = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, _BLOCK)
    half: tl.constexpr = WEIGHT_ROWS // 2
    if GATED:
        # rows of gate and up alternate, so that one program has both rows of a pair, side by side
        index = tl.arange(0, WEIGHT_ROWS)
        output = tl.program_id(0) * half + tl.arange(0, half)
        pair = tl.program_id(0) * half + index // 2
        number = tl.where(pair < out_size, pair + (index % 2) * out_size, 0)
    else:
        output = tl.program_id(0) * WEIGHT_ROWS + tl.arange(0, WEIGHT_ROWS)
        number = tl.where(output < out_size, output, 0)
    groups = (in_size + _BLOCK - 1) // _BLOCK
    share = (groups + splits - 1) // splits
    begin = split * share * _BLOCK
    end = tl.minimum(begin + share * _BLOCK, in_size)
    if GROUPED:
        if OVERLAP:
            wait_for_previous()
        expert = tl.load(expert_ptr + tile)
        if expert < 0:
            return
        exists, source, target = find_rows(
            order_ptr, ends_ptr, first_ptr, tile, expert, row, PER_TOKEN, GATHER, SCATTER
        )
        values_ptr += expert.to(tl.int64) * weight_rows * in_size
        if SCALED:
            scales_ptr += expert.to(tl.int64) * row_groups * scale_stride
        weights = values_ptr + number.to(tl.int64)[:, None] * in_size + column[None, :]
    else:
        exists, source, target = row < rows, row, row
        weights = values_ptr + number.to(tl.int64)[:, None] * in_size + column[None, :]
        if OVERLAP:
            lines = (
                values_ptr + number.to(tl.int64)[:, None] * in_size + begin + tl.arange(0, AHEAD // 128)[None, :] * 128
            )
            prefetch(lines)
            wait_for_previous()
    inputs = x_ptr + source.to(tl.int64)[:, None] * in_size + column[None, :]
    if SCALED:
        scales = scales_ptr + (number // ROW_GROUP) * scale_stride
    acc = tl.zeros([WEIGHT_ROWS, ROWS], tl.float32)
    for at in range(begin, end, _BLOCK):
        if WHOLE:
            weight = tl.load(weights + at)
            x = tl.load(inputs + at, mask=exists[:, None], other=0.0)
        else:
            left = at + column < in_size
            weight = tl.load(weights + at, mask=left[None, :], other=0.0)
            x = tl.load(inputs + at, mask=exists[:, None] & left[None, :], other=0.0)
        if TWO_PARTS:
            high, low, scale = _two_parts(x)
            product = tl.dot(weight, tl.trans(low)) * (1.0 / 16)
            product += tl.dot(weight, tl.trans(high))
            if BY_ROW:
                acc += product * scale[None, :]
            else:
                acc += product * tl.load(scales + at // _BLOCK)[:, None] * scale[None, :]
        elif BY_ROW:
            acc = tl.dot(_converted(weight, x.dtype), tl.trans(x), acc, input_precision=PRECISION)
        elif SCALED:
            product = tl.dot(_converted(weight, x.dtype), tl.trans(x), input_precision=PRECISION)
            acc += product * tl.load(scales + at // _BLOCK)[:, None]
        else:
            acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
    if BY_ROW:
        acc *= tl.load(scales)[:, None]
    if SPLIT:
        block = tile * tl.num_programs(0) + tl.program_id(0)
        if store_part(acc, sums_ptr, counters_ptr, block, split, splits, WEIGHT_ROWS, ROWS):
            total = add_parts(sums_ptr, block, splits, WEIGHT_ROWS, ROWS)
            _store_result(total, bias_ptr, out_ptr, out_size, number, target, exists, output, GATED, BIAS, half, ROWS)
    else:
        _store_result(acc, bias_ptr, out_ptr, out_size, number, target, exists, output, GATED, BIAS, half, ROWS)


def launch_few_rows(
    x: torch.Tensor,
    weight: Weight,
    out: torch.Tensor,
    *,
    gated: bool,
    bias: torch.Tensor | None = None,
    tiles: RowTiles | None = None,
    gather: bool = False,
) -> None:
    """Fill `out` [rows, outputs]: for all rows of x, at most 64, or for the rows of `tiles`, without a bias. RowTiles
    describes `gather`.
    """
    if isinstance(weight, Fp8Matrix):
        values, row_group = weight.values, weight.row_group
        scales: torch.Tensor | None = weight.scales
    else:
        assert isinstance(weight, torch.Tensor)
        values, row_group, scales = weight, BLOCK, None
    *_, weight_rows, in_size = values.shape
    if len(out) == 0:
        return
    two_parts = tiles is not None and scales is not None and x.dtype == torch.bfloat16
    block_rows, stage_bytes = (_SPLIT_WEIGHT_ROWS, _SPLIT_STAGE_BYTES) if two_parts else (_WEIGHT_ROWS, _STAGE_BYTES)
    rows = max(16, triton.next_power_of_2(len(x) if tiles is None else tiles.rows))
    row_tiles = 1 if tiles is None else len(tiles.expert)
    blocks, groups = ceil_div(weight_rows, block_rows), ceil_div(in_size, BLOCK)
    splits = _splits(blocks * row_tiles, groups, x.device)
    sums = counters = out  # not read
    if splits > 1:
        sums = torch.empty(blocks * row_tiles * splits * block_rows * rows, dtype=torch.float32, device=x.device)
        counters = counters_of(x.device)
    stage = block_rows * BLOCK * values.itemsize + rows * BLOCK * x.itemsize
    stages = min(stage_bytes, shared_memory(x.device)) // stage
    _few_rows[(blocks, row_tiles, splits)](
        x,
        values,
        scales,
        bias,
        out,
        sums,
        counters,
        *((None,) * 4 if tiles is None else (tiles.order, tiles.ends, tiles.expert, tiles.first)),
        len(x),
        weight_rows,
        out.shape[1],
        in_size,
        *((0, 0) if scales is None else scales.shape[-2:]),
        splits,
        SCALED=scales is not None,
        GATED=gated,
        GROUPED=tiles is not None,
        GATHER=gather,
        SCATTER=tiles is not None and not gather,
        PER_TOKEN=1 if tiles is None else tiles.per_token,
        ROW_GROUP=row_group,
        ROWS=rows,
        WEIGHT_ROWS=block_rows,
        SPLIT=splits > 1,
        WHOLE=in_size % BLOCK == 0,
        AHEAD=min(_AHEAD, 1 << max(in_size.bit_length() - 1, 7)),
        PRECISION="tf32" if x.itemsize == 2 else "ieee",
        TWO_PARTS=two_parts,
        BY_ROW=isinstance(weight, Fp8Matrix) and weight.by_row,
        BIAS=bias is not None,
        num_warps=4,
        num_stages=max(2, min(8, stages, ceil_div(groups, splits))),
        **overlap_options(x.device),
    )


def _splits(blocks: int, groups: int, device: torch.device) -> int:
    """The number of programs that divide the columns: enough for two programs per multiprocessor."""
    wanted = 2 * multiprocessors(device) // blocks
    return max(1, min(wanted, groups // _LEAST_GROUPS))
