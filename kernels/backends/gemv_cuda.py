"""Launcher of csrc/linear/gemv.cu: linear layers with weights in 16 bits and very few rows of x, on Hopper."""

from dataclasses import dataclass

import torch

from ...common.arithmetic import ceil_div
from .nvrtc import load_kernel
from .occupancy import is_hopper_or_later, multiprocessors, shared_memory

_UNIT_ROWS, _MOST_ROWS = 8, 4
"""Weight rows that a thread block multiplies at a time, and the most rows of x."""
_STEP, _LEAST_COLUMNS, _MOST_COLUMNS = 64, 256, 512
"""A chunk has a multiple of `_STEP` columns, within these bounds. Shorter copies would not keep the memory busy."""
_MOST_X_BYTES = 16 << 10
"""Bytes of x, which every block holds in shared memory. With more, the rings would hold too few weights in flight."""
_WARPS = 8
"""Warps on a multiprocessor."""
_PAD = 16
"""Bytes after a row in shared memory."""
_RESERVED = 1 << 10
"""Bytes of shared memory that the GPU reserves for every thread block."""
_ALIGNMENT = 128
_LEAST_SHARED_BYTES = 200 << 10
"""Required on a multiprocessor: those of Hopper and later data-centre GPUs have more, all others less than half."""


@dataclass(frozen=True)
class Division:
    """How the kernel divides a layer."""

    columns: int  # of a chunk
    warps: int
    slots: int  # of a warp's ring
    blocks: int
    shared_bytes: int


def suits_gemv(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel supports x [rows, in] and weight [out, in]."""
    if not x.is_cuda or x.dtype.itemsize != 2 or not is_hopper_or_later(x.device):
        return False
    if shared_memory(x.device) < _LEAST_SHARED_BYTES:
        return False
    few = 1 <= len(x) <= _MOST_ROWS and x.nbytes <= _MOST_X_BYTES
    aligned = x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0 and x.is_contiguous() and weight.is_contiguous()
    return few and aligned and len(weight) > 0 and weight.dtype == x.dtype and _chunk_columns(x.shape[1]) is not None


def launch_gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, gated: bool
) -> None:
    """Fill `out` [rows, outputs], for tensors that `suits_gemv` accepts."""
    rows, outputs = out.shape
    units = ceil_div(outputs, _UNIT_ROWS // 2 if gated else _UNIT_ROWS)
    division = divide(units, *x.shape, processors=multiprocessors(x.device), limit=shared_memory(x.device))
    constants = (
        ("WARPS", division.warps),
        ("SLOTS", division.slots),
        ("COLUMNS", division.columns),
        ("GATED", int(gated)),
        ("BIAS", int(bias is not None)),
        ("HALF", int(x.dtype == torch.float16)),
    )
    load_kernel("linear/gemv.cu", "gemv", x.device, constants, shared_memory(x.device)).launch(
        x.data_ptr(),
        weight.data_ptr(),
        (out if bias is None else bias).data_ptr(),
        out.data_ptr(),
        rows,
        outputs,
        x.shape[1],
        blocks=division.blocks,
        threads=32 * division.warps,
        shared_bytes=division.shared_bytes,
        overlap_previous=True,
    )


def divide(units: int, rows: int, columns: int, *, processors: int, limit: int) -> Division:
    """The division for `units` units and x of `rows` rows and `columns` columns. The thread blocks on a multiprocessor
    share `limit` bytes of shared memory.
    """
    chunk = _chunk_columns(columns)
    assert chunk is not None, "as suits_gemv found"
    chunks = columns // chunk
    warps = min(chunks, _WARPS)
    at_a_time = _WARPS // warps  # thread blocks on a multiprocessor
    turns = ceil_div(chunks, warps)  # chunks of a warp in a unit
    x_bytes = rows * chunks * 2 * (chunk + _PAD)
    sum_bytes = 2 * warps * 32 * 4
    slot_bytes = warps * (_UNIT_ROWS * (2 * chunk + _PAD) + 8)  # with barriers
    available = limit // at_a_time - (at_a_time > 1) * _RESERVED
    most_slots = (available - x_bytes - sum_bytes - _ALIGNMENT) // slot_bytes
    per_block = ceil_div(units, at_a_time * processors)
    if 1 < per_block <= most_slots // turns:  # rings can hold all weights: use fewer blocks
        per_block = most_slots // turns
    slots = min(most_slots, per_block * turns)
    own_bytes = ceil_div(slots * slot_bytes + sum_bytes, _ALIGNMENT) * _ALIGNMENT
    return Division(chunk, warps, slots, ceil_div(units, per_block), own_bytes + x_bytes)


def _chunk_columns(columns: int) -> int | None:
    """Columns of a chunk of rows of `columns` columns; None if these cannot be divided into long enough chunks."""
    for chunk in range(_MOST_COLUMNS, _LEAST_COLUMNS - 1, -_STEP):
        if columns % chunk == 0:
            return chunk
    return None
