"""Triton kernel that expands 4-bit weights: a program has some rows and one pair of groups of columns."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803  (compile-time parameters are written in capitals)

import torch
import triton
import triton.language as tl

from ...configs.arithmetic import ceil_div
from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from .group_format import GroupScaled

_ROWS = 32


@triton.jit
def _expand(
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    rows,
    columns,
    row_bytes,
    group_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    column = tl.arange(0, GROUP)
    inside = row < rows
    packed = tl.load(
        packed_ptr + row.to(tl.int64)[:, None] * row_bytes + block * GROUP + column[None, :],
        mask=inside[:, None],
        other=0,
    )
    out = out_ptr + row.to(tl.int64)[:, None] * columns + block * (2 * GROUP) + column[None, :]
    for high in tl.static_range(2):
        group = (2 * block + high) * group_stride + row
        scale = tl.load(scales_ptr + group, mask=inside, other=0.0).to(tl.float32)
        zero = tl.load(zeros_ptr + group, mask=inside, other=0).to(tl.float32)
        value = ((packed >> (4 * high)) & 15).to(tl.float32)
        expanded = ((value - zero[:, None]) * scale[:, None]).to(out_ptr.dtype.element_ty)
        left = (2 * block + high) * GROUP < columns
        tl.store(out + high * GROUP, expanded, mask=inside[:, None] & left)


def launch_expand(weight: GroupScaled, out: torch.Tensor) -> None:
    """Fill `out` [rows, columns]; the weight may be a range of rows of a matrix."""
    rows, row_bytes = weight.packed.shape
    _expand[(ceil_div(rows, _ROWS), row_bytes // weight.group)](
        weight.packed,
        weight.scales,
        weight.zeros,
        out,
        rows,
        weight.columns,
        row_bytes,
        weight.scales.stride(0),
        GROUP=weight.group,
        ROWS=_ROWS,
        num_warps=4,
        **overlap_options(out.device),
    )
