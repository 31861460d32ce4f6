"""Numba kernels of ../gguf/gguf_linear.py. For one row of x, a thread multiplies blocks as it reads them. For several,
it unpacks the weights of some outputs into its cache, where all rows use them.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

import numpy as np
import torch

from ..gguf.blocks import GgufRows, ggml_number
from .dot_tile import WEIGHT_ROWS, make_dot_tile
from .gguf_blocks import dot_blocks, unpack
from .openmp import fields, floats, kernel, kernel_function, share, thread_number, threads_for
from .swiglu import activate

_FIELDS = "x blocks type row_bytes bias out out_stride scratch rows in_size out_size gated gelu"
_TILE_ROWS = 4
_dot_tile = make_dot_tile(_TILE_ROWS, fetch=False)


@kernel_function
def _result(a, product, up, output):
    """An element of the result."""
    bias = floats(a.bias, 2 * a.out_size)
    value = product + (bias[output] if a.bias else np.float32(0))
    if a.gated:
        value = activate(value, a.gelu) * (up + (bias[a.out_size + output] if a.bias else np.float32(0)))
    return value


@kernel(_FIELDS)
def _one_row(arguments):
    a = fields(arguments)
    out, tile_bytes = floats(a.out, a.out_size), WEIGHT_ROWS * a.row_bytes
    first, last = share(-(-a.out_size // WEIGHT_ROWS))
    for output in range(first * WEIGHT_ROWS, min(last * WEIGHT_ROWS, a.out_size), WEIGHT_ROWS):
        count = min(WEIGHT_ROWS, a.out_size - output)
        products = ups = dot_blocks(a.type, a.blocks + output * a.row_bytes, a.row_bytes, count, a.x, tile_bytes)
        if a.gated:
            source = a.blocks + (a.out_size + output) * a.row_bytes
            ups = dot_blocks(a.type, source, a.row_bytes, count, a.x, tile_bytes)
        for i in range(count):
            out[output + i] = _result(a, products[i], ups[i], output + i)


@kernel(_FIELDS)
def _few_rows(arguments):
    a = fields(arguments)
    out, tile_bytes = floats(a.out, (a.rows, a.out_stride)), WEIGHT_ROWS * a.row_bytes
    half_bytes = WEIGHT_ROWS * 4 * a.in_size
    weights = a.scratch + thread_number() * 2 * half_bytes
    first, last = share(-(-a.out_size // WEIGHT_ROWS))
    for output in range(first * WEIGHT_ROWS, min(last * WEIGHT_ROWS, a.out_size), WEIGHT_ROWS):
        count = min(WEIGHT_ROWS, a.out_size - output)
        for half in range(1 + a.gated):
            source = a.blocks + (half * a.out_size + output) * a.row_bytes
            unpack(a.type, source, source + count * a.row_bytes, weights + half * half_bytes, tile_bytes)
        for row in range(0, a.rows, _TILE_ROWS):
            x, x_rows = a.x + row * 4 * a.in_size, a.rows - row
            products = _dot_tile(weights, count, x, x_rows, 0, 0, a.in_size)
            ups = products
            if a.gated:
                ups = _dot_tile(weights + half_bytes, count, x, x_rows, 0, 0, a.in_size)
            for i in range(count):
                for j in range(min(_TILE_ROWS, x_rows)):
                    at = i * _TILE_ROWS + j
                    out[row + j, output + i] = _result(a, products[at], ups[at], output + i)


@kernel("blocks type row_bytes out out_bytes rows")
def _unpack(arguments):
    a = fields(arguments)
    first, last = share(a.rows)
    if first < last:
        source = a.blocks + first * a.row_bytes
        end = a.blocks + last * a.row_bytes
        unpack(a.type, source, end, a.out + first * a.out_bytes, 1024)


def launch_linear(
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
    scratch = None if rows == 1 else torch.empty(threads, 2, WEIGHT_ROWS, in_size)
    product = _one_row if rows == 1 else _few_rows
    product(
        x.data_ptr(),
        weight.blocks.data_ptr(),
        ggml_number(weight.type_name),
        weight.blocks.shape[1],
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        0 if scratch is None else scratch.data_ptr(),
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
