"""Numba kernels of ../gguf/gguf_linear.py: a thread unpacks the weights of some outputs into its cache, where all rows
of x use them.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

from typing import Any

import numpy as np
import torch

from ..gguf.blocks import GgufRows, ggml_number
from .dot_tile import WEIGHT_ROWS, make_dot_tile
from .gguf_unpack import unpack
from .openmp import fields, floats, kernel, kernel_function, share, thread_number, threads_for
from .swiglu import activate


def _make_products(tile_rows: int) -> Any:
    """The loop over tiles of `tile_rows` rows of x, for outputs whose weights are unpacked."""
    dot_tile = make_dot_tile(tile_rows, fetch=False)

    @kernel_function
    def compute(a, weights, output, count):
        out, bias = floats(a.out, (a.rows, a.out_stride)), floats(a.bias, 2 * a.out_size)
        zero = np.float32(0)
        for row in range(0, a.rows, tile_rows):
            x, x_rows = a.x + row * 4 * a.in_size, a.rows - row
            sums = dot_tile(weights, count, x, x_rows, 0, 0, a.in_size)
            ups = sums
            if a.gated:
                ups = dot_tile(weights + WEIGHT_ROWS * 4 * a.in_size, count, x, x_rows, 0, 0, a.in_size)
            for i in range(count):
                for j in range(min(tile_rows, x_rows)):
                    value = sums[i * tile_rows + j] + (bias[output + i] if a.bias else zero)
                    if a.gated:
                        up = ups[i * tile_rows + j] + (bias[a.out_size + output + i] if a.bias else zero)
                        value = activate(value, a.gelu) * up
                    out[row + j, output + i] = value

    return compute


_one_row, _four_rows = _make_products(1), _make_products(4)


@kernel("x blocks type row_bytes bias out out_stride scratch rows in_size out_size gated gelu")
def _linear(arguments):
    a = fields(arguments)
    tile_bytes, scratch_bytes = WEIGHT_ROWS * a.row_bytes, WEIGHT_ROWS * 4 * a.in_size
    weights = a.scratch + thread_number() * (1 + a.gated) * scratch_bytes
    first, last = share(-(-a.out_size // WEIGHT_ROWS))
    for output in range(first * WEIGHT_ROWS, min(last * WEIGHT_ROWS, a.out_size), WEIGHT_ROWS):
        count = min(WEIGHT_ROWS, a.out_size - output)
        for half in range(1 + a.gated):
            source = a.blocks + (half * a.out_size + output) * a.row_bytes
            unpack(a.type, source, source + count * a.row_bytes, weights + half * scratch_bytes, tile_bytes)
        if a.rows == 1:
            _one_row(a, weights, output, count)
        else:
            _four_rows(a, weights, output, count)


@kernel("blocks type row_bytes out out_bytes rows")
def _unpack(arguments):
    a = fields(arguments)
    first, last = share(a.rows)
    if first < last:
        source = a.blocks + first * a.row_bytes
        end = a.blocks + last * a.row_bytes
        unpack(a.type, source, end, a.out + first * a.out_bytes, 1024)


def launch_gguf_linear(
    x: torch.Tensor,
    weight: GgufRows,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    gated: bool,
    gelu: bool = False,
) -> None:
    """`out` may be some columns of a matrix."""
    rows, in_size = x.shape
    threads = threads_for(out.shape[1] * in_size)
    scratch = torch.empty(threads, 1 + gated, WEIGHT_ROWS, in_size)
    _linear(
        x.data_ptr(),
        weight.blocks.data_ptr(),
        ggml_number(weight.type_name),
        weight.blocks.shape[1],
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        scratch.data_ptr(),
        rows,
        in_size,
        out.shape[1],
        gated,
        gelu,
        threads=threads,
    )


def launch_unpack(weight: GgufRows, out: torch.Tensor) -> None:
    rows, columns = out.shape
    _unpack(
        weight.blocks.data_ptr(),
        ggml_number(weight.type_name),
        weight.blocks.shape[1],
        out.data_ptr(),
        4 * columns,
        rows,
        threads=threads_for(out.numel()),
    )
