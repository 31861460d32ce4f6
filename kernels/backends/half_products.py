"""Products of 16-bit matrices on CPUs.

If a processor has no instructions for the type, torch takes much longer than in float32: 80 to 270 times as long for 8
to 512 rows of bfloat16 on Neoverse-N1. On such processors, values are expanded to float32, and results are rounded
once, as everywhere else.
"""

import time
from collections.abc import Callable

import torch
from torch.nn.functional import grouped_mm
from torch.nn.functional import linear as torch_linear

_PART_BYTES = 64 << 20
"""Of the expanded weights. The largest, such as lm_head, are expanded in parts."""
_PROBE = 128
"""Rows and columns of the matrices that are multiplied to compare the types."""
_CHOICES: dict[torch.dtype, torch.dtype] = {}
"""The results of `computes_in`: the same in all steps of this process."""


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias, as `torch.nn.functional.linear`."""
    if x.is_cuda or computes_in(x.dtype) is x.dtype:
        return torch_linear(x, weight, bias)
    wide, step = x.float(), max(1, _PART_BYTES // (4 * weight.shape[1]))
    parts = []
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        part_bias = None if bias is None else bias[rows].float()
        parts.append(torch_linear(wide, weight[rows].float(), part_bias).to(x.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def grouped_reference(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows [ends[i - 1], ends[i]) times matrices[i], as `torch.nn.functional.grouped_mm`. Other rows are undefined."""
    if rows.is_cuda or computes_in(rows.dtype) is rows.dtype:
        return grouped_mm(rows, matrices, offs=ends)
    result = rows.new_empty(len(rows), matrices.shape[2])
    start = 0
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        if end > start:
            result[start:end] = rows[start:end].float() @ matrix.float()
        start = end
    return result


def computes_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a CPU multiplies values of `dtype`: float32 if this processor is slow in 16 bits."""
    if dtype not in _CHOICES:
        choose_products(dtype)
    return _CHOICES[dtype]


def choose_products(dtype: torch.dtype, minimum: Callable[[int], int] = lambda fast: fast) -> None:
    """Measure once what `computes_in` will return. `minimum` returns the minimum over all ranks of a server: every rank
    selects the experts of a token from its own products, so all ranks must round in the same way.
    """
    fast = dtype.itemsize != 2 or minimum(int(_is_fast(dtype)))
    _CHOICES[dtype] = dtype if fast else torch.float32


def _is_fast(dtype: torch.dtype) -> bool:
    """Measured on one thread: on a busy machine, several threads mostly wait for each other, for both dtypes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        matrix = torch.ones(_PROBE, _PROBE)
        return _fastest_s(matrix.to(dtype)) <= 2 * _fastest_s(matrix)
    finally:
        torch.set_num_threads(threads)


def _fastest_s(matrix: torch.Tensor) -> float:
    times = []
    for _ in range(4):  # the first one loads code
        start = time.thread_time()
        matrix @ matrix
        times.append(time.thread_time() - start)
    return min(times)
