"""Numba kernel of ../linear/swiglu.py: a thread computes some of the columns of every row."""
# mypy: allow-untyped-defs, allow-untyped-decorators

import numpy as np
import torch

from .openmp import exp, fields, floats, kernel, share, threads_for


@kernel("gate_up out rows size")
def _swiglu(arguments):
    a = fields(arguments)
    gate_up, out = floats(a.gate_up, (a.rows, 2, a.size)), floats(a.out, (a.rows, a.size))
    first, last = share(a.size)
    for row in range(a.rows):
        for i in range(first, last):
            gate = gate_up[row, 0, i]
            out[row, i] = gate / (np.float32(1) + exp(-gate)) * gate_up[row, 1, i]


def launch_swiglu(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    rows, size = out.shape
    _swiglu(gate_up.data_ptr(), out.data_ptr(), rows, size, threads=threads_for(rows * size))
