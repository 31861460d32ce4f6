"""Launcher of csrc/linear/float_at_once.cu: float32 linear layers whose weights fit in the shared memory of a GPU."""

import torch

from ...common.arithmetic import ceil_div
from .fp8_at_once_cuda import COLUMNS, GPC, MOST_BLOCKS, MOST_ROWS, UNIT, WARPS, Division, row_tiles_of
from .nvrtc import load_kernel
from .occupancy import multiprocessors

_CLUSTER, _ELEMENT_BYTES = 8, 4
"""Thread blocks that divide the columns, and bytes of a weight."""


def _division(weight: torch.Tensor) -> Division:
    return Division(units=1, cluster=_CLUSTER, tiles=ceil_div(len(weight), UNIT))


def suits_float_at_once(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel supports these rows and float32 weights, and all its thread blocks run at the same time."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device) != (9, 0):
        return False
    columns = weight.shape[1]
    if not 1 <= len(x) <= MOST_ROWS or columns % COLUMNS or ceil_div(columns // COLUMNS, _CLUSTER) > MOST_BLOCKS:
        return False
    if columns // COLUMNS < _CLUSTER or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return False
    return _division(weight).tiles <= multiprocessors(x.device) // GPC * (GPC // _CLUSTER)


def launch_float_at_once(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` [rows, outputs], for tensors that `suits_float_at_once` accepts."""
    division, row_tiles = _division(weight), row_tiles_of(x)
    constants = (("UNITS", division.units), ("ROW_TILES", row_tiles), ("CLUSTER", division.cluster))
    shared_bytes = division.shared_bytes(x.shape[1], row_tiles, _ELEMENT_BYTES)
    load_kernel("linear/float_at_once.cu", "float_at_once", x.device, constants, shared_bytes).launch(
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        len(x),
        len(weight),
        x.shape[1],
        blocks=division.cluster * division.tiles,
        threads=32 * WARPS,
        shared_bytes=shared_bytes,
        overlap_previous=True,
    )
