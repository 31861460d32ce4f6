"""Numba kernel of ../linear/swiglu.py: a thread computes some of the columns of every row."""
# mypy: allow-untyped-defs, allow-untyped-decorators

import numpy as np
import torch

from ..linear.swiglu import GELU_CUBIC, GELU_FACTOR
from .openmp import exp, fields, floats, kernel, kernel_function, share, threads_for

_ONE, _GELU_FACTOR, _GELU_CUBIC = np.float32(1), np.float32(GELU_FACTOR), np.float32(GELU_CUBIC)


@kernel_function
def activate(gate, gelu):
    """The activation of a gate."""
    exponent = gate
    if gelu:
        exponent = _GELU_FACTOR * (gate + _GELU_CUBIC * gate * gate * gate)
    return gate / (_ONE + exp(-exponent))


@kernel("gate_up out rows size gelu")
def _swiglu(arguments):
    a = fields(arguments)
    gate_up, out = floats(a.gate_up, (a.rows, 2, a.size)), floats(a.out, (a.rows, a.size))
    first, last = share(a.size)
    for row in range(a.rows):
        for i in range(first, last):
            out[row, i] = activate(gate_up[row, 0, i], a.gelu) * gate_up[row, 1, i]


def launch_swiglu(gate_up: torch.Tensor, out: torch.Tensor, *, gelu: bool = False) -> None:
    rows, size = out.shape
    _swiglu(gate_up.data_ptr(), out.data_ptr(), rows, size, gelu, threads=threads_for(rows * size))
