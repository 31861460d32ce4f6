"""Triton kernel for experts in NVFP4 (nvfp4_experts.py).

A program multiplies a block of weight rows (outputs) with a tile of rows of x, over a range of columns. A step of its
loop reads the bytes of one block of columns and two groups of their scales, and multiplies the low halves with the
first columns and the high halves with the others. Values are multiplied with their scales in 16 bits, in the
instruction that converts them. If there are few programs, several divide the columns (split-K).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ...common.arithmetic import ceil_div
from ..backends.occupancy import counters_of, shared_memory
from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from ..backends.split_sums_triton import add_parts, store_part
from ..linear.few_rows_triton import find_rows
from ..linear.row_tiles import RowTiles
from ..moe.packed_experts_triton import column_splits, store_result
from ..packed4.unpack_triton import e2m1
from .nvfp4 import GROUP
from .nvfp4_experts import Nvfp4Experts

_GROUP = tl.constexpr(GROUP)
_STAGE_BYTES = 48 << 10
"""Shared memory of a program for loads in flight: four programs of few rows fit a multiprocessor."""
_SHIFT = tl.constexpr(256.0)
"""Values times scales are in registers divided by this, so that the factor of `_ASM` fits 16 bits."""

# As for MXFP4 (packed4/unpack_triton.py), the bits of a value at their places in a 16-bit float give the value times a
# power of two. Here a scale that includes the inverse of that power is the second factor of the multiplication.
_ASM = """{{
    .reg .b32 first, second, part, zero;
    mov.b32 zero, 0x80008000;
    prmt.b32 first, $4, 0, 0x1404;
    prmt.b32 second, $4, 0, 0x3424;
    shr.b32 part, first, {shift};
    and.b32 part, part, {mask};
    and.b32 $2, first, 0x80008000;
    or.b32 $2, $2, part;
    shr.b32 part, second, {shift};
    and.b32 part, part, {mask};
    and.b32 $3, second, 0x80008000;
    or.b32 $3, $3, part;
    shl.b32 first, first, 4;
    shl.b32 second, second, 4;
    shr.b32 part, first, {shift};
    and.b32 part, part, {mask};
    and.b32 $0, first, 0x80008000;
    or.b32 $0, $0, part;
    shr.b32 part, second, {shift};
    and.b32 part, part, {mask};
    and.b32 $1, second, 0x80008000;
    or.b32 $1, $1, part;
    fma.rn.{type} $0, $0, $5, zero;
    fma.rn.{type} $1, $1, $6, zero;
    fma.rn.{type} $2, $2, $7, zero;
    fma.rn.{type} $3, $3, $8, zero;
    }}"""
_BFLOAT16_ASM = tl.constexpr(_ASM.format(shift=6, mask="0x01c001c0", type="bf16x2"))
_FLOAT16_ASM = tl.constexpr(_ASM.format(shift=3, mask="0x0e000e00", type="f16x2"))
_CONSTRAINTS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r")


@triton.jit
def _scales(stored, dtype: tl.constexpr):
    """fp8 scales, from their bytes, in `dtype`, times the power of two of `_ASM` divided by `_SHIFT`."""
    exact = (stored.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    if dtype == tl.bfloat16:
        return (exact * 332306998946228968225951765070086144.0).to(dtype)  # 2 ** 118
    elif dtype == tl.float16:  # noqa: RET505 - the other branches are not compiled
        return (exact * 64.0).to(dtype)
    else:
        return exact * (1.0 / _SHIFT)


@triton.jit
def _unpack(packed, low_scales, high_scales):
    """The values in the low and in the high halves of bytes [groups, 16, n], times scales [groups, 1, n]."""
    dtype: tl.constexpr = low_scales.dtype
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _BFLOAT16_ASM,
            _CONSTRAINTS,
            [packed, tl.broadcast_to(low_scales, packed.shape), tl.broadcast_to(high_scales, packed.shape)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif dtype == tl.float16:  # noqa: RET505 - the other branches are not compiled
        return tl.inline_asm_elementwise(
            _FLOAT16_ASM,
            _CONSTRAINTS,
            [packed, tl.broadcast_to(low_scales, packed.shape), tl.broadcast_to(high_scales, packed.shape)],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        return e2m1(packed & 15) * low_scales, e2m1(packed >> 4) * high_scales


@triton.jit(do_not_specialize=["splits"])
def _experts(
    x_ptr,
    packed_ptr,
    scales_ptr,
    factors_ptr,
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
    scales_stride,
    block_stride,
    splits,
    GATED: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
    tile = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.arange(0, ROWS)
    index = tl.arange(0, OUTPUTS)
    if GATED:
        # rows of gate and up alternate in a program
        half: tl.constexpr = OUTPUTS // 2
        output = tl.program_id(0) * half + tl.arange(0, half)
        pair = tl.program_id(0) * half + index // 2
        number = tl.where(pair < out_size, pair + (index % 2) * out_size, 0)
    else:
        output = tl.program_id(0) * OUTPUTS + index
        number = tl.where(output < out_size, output, 0)
    blocks = row_bytes // HALF
    share = (blocks + splits - 1) // splits
    begin = split * share
    end = tl.minimum(begin + share, blocks)
    if OVERLAP:
        wait_for_previous()
    expert = tl.load(expert_ptr + tile)
    if expert < 0:
        return
    exists, source, target = find_rows(order_ptr, ends_ptr, first_ptr, tile, expert, row, PER_TOKEN, GATHER, SCATTER)
    packed_ptr += expert.to(tl.int64) * weight_rows * row_bytes
    scales_ptr += expert.to(tl.int64) * scales_stride
    factors_ptr += expert.to(tl.int64) * weight_rows
    groups: tl.constexpr = HALF // _GROUP
    group = tl.arange(0, groups)[:, None, None]
    place = group * _GROUP + tl.arange(0, _GROUP)[None, :, None]
    weights = packed_ptr + number.to(tl.int64)[None, None, :] * row_bytes + place
    scales = scales_ptr + number[None, None, :] * (2 * groups) + group
    column = tl.arange(0, HALF)
    inputs = x_ptr + source.to(tl.int64)[:, None] * in_size + column[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for block in range(begin, end):
        packed = tl.load(weights + block * HALF)
        of_block = scales + block * block_stride
        low_scales, high_scales = tl.load(of_block), tl.load(of_block + groups)
        first = inputs + block * (2 * HALF)
        if WHOLE:
            low_x = tl.load(first, mask=exists[:, None], other=0.0)
            high_x = tl.load(first + HALF, mask=exists[:, None], other=0.0)
        else:
            at = block * (2 * HALF) + column
            low_x = tl.load(first, mask=exists[:, None] & (at < in_size)[None, :], other=0.0)
            high_x = tl.load(first + HALF, mask=exists[:, None] & (at + HALF < in_size)[None, :], other=0.0)
        low, high = _unpack(packed, _scales(low_scales, dtype), _scales(high_scales, dtype))
        acc = tl.dot(low_x, tl.reshape(low, [HALF, OUTPUTS]), acc, input_precision=PRECISION)
        acc = tl.dot(high_x, tl.reshape(high, [HALF, OUTPUTS]), acc, input_precision=PRECISION)
    acc *= (tl.load(factors_ptr + number) * _SHIFT)[None, :]
    if SPLIT:
        place_of_sums = tile * tl.num_programs(0) + tl.program_id(0)
        if store_part(acc, sums_ptr, counters_ptr, place_of_sums, split, splits, ROWS, OUTPUTS):
            total = add_parts(sums_ptr, place_of_sums, splits, ROWS, OUTPUTS)
            store_result(
                total,
                None,
                out_ptr,
                out_size,
                0.0,
                number,
                target,
                exists,
                output,
                GATED,
                False,
                False,
                ROWS,
                OUTPUTS,
            )
    else:
        store_result(
            acc, None, out_ptr, out_size, 0.0, number, target, exists, output, GATED, False, False, ROWS, OUTPUTS
        )


def launch_experts(
    x: torch.Tensor, weight: Nvfp4Experts, out: torch.Tensor, tiles: RowTiles, *, gated: bool, gather: bool
) -> None:
    """Fill `out` [rows, outputs] for the rows of `tiles`. RowTiles describes `gather`."""
    if len(out) == 0:
        return
    *_, weight_rows, row_bytes = weight.packed.shape
    rows, row_tiles = max(16, triton.next_power_of_2(tiles.rows)), len(tiles.expert)
    outputs = 64 if rows <= 32 else 128
    programs, blocks = ceil_div(weight_rows, outputs), row_bytes // weight.half
    splits = column_splits(programs * row_tiles, blocks, x.device)
    sums = counters = out  # not read
    if splits > 1:
        sums = torch.empty(programs * row_tiles * splits * rows * outputs, dtype=torch.float32, device=x.device)
        counters = counters_of(x.device)
        assert programs * row_tiles <= len(counters)
    stage = outputs * weight.half + 2 * rows * weight.half * x.itemsize
    stages = min(8, min(_STAGE_BYTES, shared_memory(x.device)) // stage, ceil_div(blocks, splits))
    scales = weight.scales.view(torch.uint8)
    _experts[(programs, row_tiles, splits)](
        x,
        weight.packed,
        scales,
        weight.factors,
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
        scales.stride(0),
        scales.stride(-3),
        splits,
        GATED=gated,
        GATHER=gather,
        SCATTER=not gather,
        PER_TOKEN=tiles.per_token,
        HALF=weight.half,
        ROWS=rows,
        OUTPUTS=outputs,
        SPLIT=splits > 1,
        WHOLE=weight.columns == 2 * row_bytes,
        PRECISION="tf32" if x.itemsize == 2 else "ieee",
        num_warps=2 if rows <= 32 else 8,
        num_stages=max(2, stages),
        **overlap_options(x.device),
    )
