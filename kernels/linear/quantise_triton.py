"""Triton kernels of quantise.py. A program quantises one group of columns of a few rows or, with a scale per row, one
row. It keeps the values in registers between computing their maximum and dividing them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from .fp8_format import BLOCK, LARGEST
from .quantise import SMALLEST_SCALE

_ROWS = 32
_WARP_ELEMENTS = 1024
"""Elements of a row per warp: 32 for each thread, so that gate and up fit in registers."""
_MOST_WARPS = 32

_BLOCK = tl.constexpr(BLOCK)
_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _gated(gate, up):
    """swiglu of 16-bit numbers, in float32 but with the same roundings as swiglu.py."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    return (silu * up.to(tl.float32)).to(gate.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "padded_rows"])
def _quantise(
    x_ptr,
    live_ptr,
    values_ptr,
    scales_ptr,
    rows,
    padded_rows,
    columns,
    GATED: tl.constexpr,
    LIVE: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if LIVE:
        live_rows = tl.load(live_ptr)
        if tl.program_id(0) * ROWS >= live_rows:
            return
    column = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    width = columns * 2 if GATED else columns
    place = x_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
    stored = tl.load(place, mask=inside, other=0.0)
    x = stored.to(tl.float32)
    if GATED:
        x = _gated(stored, tl.load(place + columns, mask=inside, other=0.0))
    scale = tl.maximum(tl.max(tl.abs(x), 1) / _LARGEST, _SMALLEST_SCALE)
    values = (x / scale[:, None]).to(tl.float8e4nv)
    kept = row < padded_rows
    out = values_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out, values, mask=kept[:, None] & (column < columns)[None, :])
    tl.store(scales_ptr + tl.program_id(1) * padded_rows + row, scale, mask=kept)


def launch_quantise(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, live_rows: torch.Tensor | None, *, gated: bool
) -> None:
    """Fill `values` and `scales`, also their rows of zeros behind those of `x`."""
    padded, columns = values.shape
    if padded == 0:
        return
    _quantise[(triton.cdiv(padded, _ROWS), scales.shape[1])](
        x,
        live_rows,
        values,
        scales,
        len(x),
        padded,
        columns,
        GATED=gated,
        LIVE=live_rows is not None,
        ROWS=_ROWS,
        num_warps=4,
        **overlap_options(x.device),
    )


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
        x = _gated(stored, tl.load(place + columns, mask=inside, other=0.0))
    scale = tl.maximum(tl.max(tl.abs(x), 0) / _LARGEST, _SMALLEST_SCALE)
    tl.store(values_ptr + row * columns + column, (x / scale).to(tl.float8e4nv), mask=column < columns)
    tl.store(scales_ptr + row, scale)


def launch_quantise_rows(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, *, gated: bool) -> None:
    """Fill `values` and `scales`, also their rows of zeros behind those of `x`."""
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
