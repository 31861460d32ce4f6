"""Numba kernel of ../linear/linear.py for few rows: a thread computes some outputs and reads their weights once."""
# mypy: allow-untyped-defs, allow-untyped-decorators

from typing import Any

import numpy as np
import torch

from .dot_tile import WEIGHT_ROWS, make_dot_tile
from .openmp import fields, floats, kernel, kernel_function, share, threads_for
from .swiglu import activate


def _make_loops(tile_rows: int) -> Any:
    """The loops over tiles of `tile_rows` rows of x."""
    dot_tile = make_dot_tile(tile_rows)

    @kernel_function
    def products(a, output, end, row, ahead, ahead_count):
        """Products of outputs [output, end) and rows from `row` on; prefetches the weights from `ahead` on."""
        row_bytes = 4 * a.in_size
        return dot_tile(
            a.weight + output * row_bytes,
            end - output,
            a.x + row * row_bytes,
            a.rows - row,
            a.weight + ahead * row_bytes,
            ahead_count,
            a.in_size,
        )

    @kernel_function
    def compute(a):
        out, half = floats(a.out, (a.rows, a.out_size)), a.out_size
        bias = floats(a.bias, 2 * half)
        zero = np.float32(0)
        tiles = -(-a.rows // tile_rows)  # tiles over the same weights share the prefetching of the next ones
        ahead_count = max(1, WEIGHT_ROWS // tiles)
        first, last = share(-(-a.out_size // WEIGHT_ROWS))
        first, last = first * WEIGHT_ROWS, min(last * WEIGHT_ROWS, a.out_size)
        for output in range(first, last, WEIGHT_ROWS):
            for tile in range(tiles):
                row = tile * tile_rows
                ahead = output + WEIGHT_ROWS + tile * ahead_count % WEIGHT_ROWS
                sums = products(a, output, last, row, ahead, ahead_count)
                ups = products(a, half + output, half + last, row, half + ahead, ahead_count) if a.gated else sums
                for i in range(min(WEIGHT_ROWS, last - output)):
                    for j in range(min(tile_rows, a.rows - row)):
                        value = sums[i * tile_rows + j] + (bias[output + i] if a.bias else zero)
                        if a.gated:
                            up = ups[i * tile_rows + j] + (bias[half + output + i] if a.bias else zero)
                            value = activate(value, a.gelu) * up
                        out[row + j, output + i] = value

    return compute


_one_row, _four_rows = _make_loops(1), _make_loops(4)


@kernel("x weight bias out rows in_size out_size gated gelu")
def _linear(arguments):
    a = fields(arguments)
    if a.rows == 1:
        _one_row(a)
    else:
        _four_rows(a)


def launch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    gated: bool,
    gelu: bool = False,
) -> None:
    rows, in_size = x.shape
    _linear(
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        in_size,
        out.shape[1],
        gated,
        gelu,
        threads=threads_for(weight.numel()),
    )
