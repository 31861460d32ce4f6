"""Numba kernels of ../gguf/gguf_linear.py for interleaved blocks: a thread computes some groups of 16 outputs."""
# mypy: allow-untyped-defs, allow-untyped-decorators

import numpy as np
import torch

from ..backends.dispatch import NEON
from ..gguf.blocks import GgufRows, ggml_number
from ..gguf.interleaved import GROUP_ROWS, TILE_COLUMNS
from .interleaved_tiles import AVX2, PACKED_BYTES, make_multiply, pack_row
from .openmp import fields, floats, kernel, kernel_function, share, thread_number, threads_for, wait_for_team
from .swiglu import activate

_FEW, _MANY = (2, 4) if AVX2 else (4, 8)
_WEIGHT_ROWS = 4 if NEON else GROUP_ROWS
"""Weight rows that are multiplied at a time with several rows of x: as many as their sums fit in registers."""
_multiply_one = make_multiply(1, GROUP_ROWS)
_multiply_few, _multiply_many = make_multiply(_FEW, _WEIGHT_ROWS), make_multiply(_MANY, _WEIGHT_ROWS)


def packed_bytes(in_size: int) -> int:
    """Bytes of a packed row of x."""
    return in_size // TILE_COLUMNS * PACKED_BYTES


def products_bytes(rows: int) -> int:
    """Memory for the products of a group with `rows` rows of x; a thread needs it twice, for gate and up."""
    return 4 * GROUP_ROWS * -(-rows // _MANY) * _MANY


_products_bytes = kernel_function(products_bytes)


@kernel_function
def _group_products(number, source, in_size, x, rows, target):
    """Products of 16 rows of weights with `rows` packed rows of x, [rows, 16] floats at `target`."""
    tiles = in_size // TILE_COLUMNS
    x_bytes = tiles * PACKED_BYTES
    if rows == 1:
        _multiply_one(number, source, 0, tiles, x, x_bytes, rows, target)
    else:
        for row in range(0, rows, _MANY):
            out, first, count = target + 4 * GROUP_ROWS * row, x + row * x_bytes, rows - row
            for weight_row in range(0, GROUP_ROWS, _WEIGHT_ROWS):
                if count <= _FEW:
                    _multiply_few(number, source, weight_row, tiles, first, x_bytes, count, out)
                else:
                    _multiply_many(number, source, weight_row, tiles, first, x_bytes, count, out)


@kernel_function
def linear_share(number, blocks, row_bytes, in_size, out_size, x, rows, own, bias, out, out_stride, add, gated, gelu):
    """In a kernel: this thread's outputs of a linear layer. `x` are packed rows, `own` is memory of this
    thread for products. With `add`, results are added to `out`.
    """
    group_bytes = GROUP_ROWS * row_bytes
    groups, ups_at = out_size // GROUP_ROWS, own + _products_bytes(rows)
    products, ups = floats(own, (rows, GROUP_ROWS)), floats(ups_at, (rows, GROUP_ROWS))
    biases = floats(bias, 2 * out_size)
    first, last = share(groups)
    for group in range(first, last):
        for half in range(2 if gated else 1):  # one call: every call compiles all types again
            source, target = blocks + (half * groups + group) * group_bytes, ups_at if half else own
            _group_products(number, source, in_size, x, rows, target)
        for row in range(rows):
            results = floats(out + 4 * (row * out_stride + group * GROUP_ROWS), GROUP_ROWS)
            for i in range(GROUP_ROWS):
                output = group * GROUP_ROWS + i
                value = products[row, i] + (biases[output] if bias else np.float32(0))
                if gated:
                    up = ups[row, i] + (biases[out_size + output] if bias else np.float32(0))
                    value = activate(value, gelu) * up
                results[i] = value + (results[i] if add else np.float32(0))


@kernel("x blocks type row_bytes bias out out_stride packed own own_bytes rows in_size out_size gated gelu")
def _linear(arguments):
    a = fields(arguments)
    tiles = a.in_size // TILE_COLUMNS
    first, last = share(a.rows)
    for row in range(first, last):
        pack_row(a.type, a.x + 4 * a.in_size * row, tiles, a.packed + row * tiles * PACKED_BYTES)
    wait_for_team()
    own = a.own + thread_number() * a.own_bytes
    linear_share(
        a.type,
        a.blocks,
        a.row_bytes,
        a.in_size,
        a.out_size,
        a.packed,
        a.rows,
        own,
        a.bias,
        a.out,
        a.out_stride,
        False,
        a.gated,
        a.gelu,
    )


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
    (rows, in_size), out_size = x.shape, out.shape[1]
    threads = threads_for(rows * out_size * in_size)
    own_bytes, x_bytes = 2 * products_bytes(rows), rows * packed_bytes(in_size)
    scratch = torch.empty(threads * own_bytes + x_bytes, dtype=torch.uint8)
    own = scratch.data_ptr()
    _linear(
        x.data_ptr(),
        weight.blocks.data_ptr(),
        ggml_number(weight.type_name),
        weight.blocks.shape[1],
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        own + threads * own_bytes,
        own,
        own_bytes,
        rows,
        in_size,
        out_size,
        gated,
        gelu,
        threads=threads,
    )
