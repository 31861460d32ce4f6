"""Numba kernel of ../linear/rms_norm.py: a thread computes some of the rows."""
# mypy: allow-untyped-defs, allow-untyped-decorators

import math

import numpy as np
import torch

from .openmp import fields, floats, kernel, kernel_function, share, threads_for


@kernel_function
def norm_row(row, weight, eps, out, size):
    """In a kernel: the norm of a row, also of a head of q or k. `out` may be `row` itself."""
    squares = np.float32(0)
    for i in range(size):
        squares += row[i] * row[i]
    factor = np.float32(1 / math.sqrt(squares / size + eps))
    for i in range(size):
        out[i] = weight[i] * (row[i] * factor)


@kernel("x y weight total out rows size", "eps")
def _rms_norm(arguments):
    a = fields(arguments)
    rows, size = a.rows, a.size
    weight, out = floats(a.weight, size), floats(a.out, (rows, size))
    x, y, total = floats(a.x, (rows, size)), floats(a.y, (rows, size)), floats(a.total, (rows, size))
    first, last = share(rows)
    for row in range(first, last):
        if a.y:
            for i in range(size):
                total[row, i] = x[row, i] + y[row, i]
        norm_row(total[row], weight, a.eps, out[row], size)


def launch_rms_norm(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor,
    total: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
) -> None:
    rows, size = x.shape
    _rms_norm(
        x.data_ptr(),
        0 if y is None else y.data_ptr(),
        weight.data_ptr(),
        (x if total is None else total).data_ptr(),
        out.data_ptr(),
        rows,
        size,
        eps,
        threads=threads_for(rows * size),
    )
