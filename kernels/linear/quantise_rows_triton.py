"""Triton kernel of quantise.py with `by_row`: a program has one row, which stays in registers between its maximum and
its division.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803  (compile-time parameters are written in capitals)

import torch
import triton
import triton.language as tl

from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from .block_format import LARGEST
from .quantise import SMALLEST_SCALE

_WARP_ELEMENTS = 1024
"""Of a row per warp: 32 for each thread, so that registers suffice for gate and up."""
_MOST_WARPS = 32

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)


@triton.jit(do_not_specialize=["rows"])
def _quantise_rows(
    x_ptr,
    values_ptr,
    scales_ptr,
    rows,
    columns,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = (column < columns) & (row < rows)
    place = x_ptr + row * (columns * 2 if GATED else columns) + column
    stored = tl.load(place, mask=inside, other=0.0)
    x = stored.to(tl.float32)
    if GATED:
        up = tl.load(place + columns, mask=inside, other=0.0).to(tl.float32)
        silu = (x / (1.0 + tl.exp(-x))).to(stored.dtype).to(tl.float32)
        x = (silu * up).to(stored.dtype).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / _LARGEST, _SMALLEST_SCALE)
    tl.store(values_ptr + row * columns + column, (x / scale).to(tl.float8e4nv), mask=column < columns)
    tl.store(scales_ptr + row, scale)


def launch_quantise_rows(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, *, gated: bool) -> None:
    """Fill `values` and `scales`, whose rows of zeros behind those of `x` too."""
    padded, columns = values.shape
    if padded == 0:
        return
    block = triton.next_power_of_2(columns)
    _quantise_rows[(padded,)](
        x,
        values,
        scales,
        len(x),
        columns,
        GATED=gated,
        BLOCK=block,
        num_warps=min(_MOST_WARPS, max(1, block // _WARP_ELEMENTS)),
        **overlap_options(x.device),
    )
