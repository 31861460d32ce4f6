"""Triton kernel that expands 4-bit weights: a program has some rows of a matrix and one pair of groups of columns."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ...common.arithmetic import ceil_div
from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from .group_format import GroupScaled
from .unpack_triton import factors, unpack, unpack_e2m1

_TILE_BYTES = 4096
"""Packed weights of a program: 32 bytes for each thread."""


@triton.jit
def _expand(
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    rows,
    columns,
    row_bytes,
    matrix_bytes,
    group_stride,
    scales_stride,
    out_stride,
    MXFP4: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    block = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    matrix = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, GROUP)
    inside = row < rows
    number = tl.where(inside, row, 0)
    packed = tl.load(
        packed_ptr + matrix * matrix_bytes + number.to(tl.int64)[None, :] * row_bytes + block * GROUP + column[:, None]
    )
    group = matrix * scales_stride + 2 * block * group_stride + number
    low_scales, high_scales = tl.load(scales_ptr + group), tl.load(scales_ptr + group + group_stride)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if MXFP4:
        low, high = unpack_e2m1(packed, dtype)
    else:
        low, high = unpack(packed, tl.load(zeros_ptr + group), tl.load(zeros_ptr + group + group_stride))
    low = (low.to(tl.float32) * factors(low_scales, MXFP4)[None, :]).to(dtype)
    high = (high.to(tl.float32) * factors(high_scales, MXFP4)[None, :]).to(dtype)
    first = block * (2 * GROUP)
    out = out_ptr + matrix * out_stride + row.to(tl.int64)[None, :] * columns + first + column[:, None]
    tl.store(out, low, mask=inside[None, :])
    tl.store(out + GROUP, high, mask=inside[None, :] & (first + GROUP < columns))


def launch_expand(weight: GroupScaled, out: torch.Tensor) -> None:
    """Fill `out` [..., rows, columns], one matrix or one per expert; both may be a range of rows of larger matrices."""
    single = weight.packed.ndim == 2
    packed, scales, expanded = (part[None] if single else part for part in (weight.packed, weight.scales, out))
    experts, rows, row_bytes = packed.shape
    tile = _TILE_BYTES // weight.group
    _expand[(row_bytes // weight.group, ceil_div(rows, tile), experts)](
        packed,
        scales,
        weight.zeros,
        expanded,
        rows,
        weight.columns,
        row_bytes,
        packed.stride(0),
        scales.stride(1),
        scales.stride(0),
        expanded.stride(0),
        MXFP4=weight.zeros is None,
        GROUP=weight.group,
        ROWS=tile,
        num_warps=4,
        **overlap_options(out.device),
    )
