"""Launcher of csrc/linear/fp8_at_once.cu: fp8 linear layers whose weights fit in the shared memory of a GPU."""

import functools
from typing import NamedTuple

import torch

from ...common.arithmetic import ceil_div
from .nvrtc import load_kernel
from .occupancy import multiprocessors

MOST_ROWS = 32
"""Rows of x that the kernel supports."""
_ROW_TILE, UNIT = 8, 16
"""Rows of x and of the weights in one mma instruction."""
COLUMNS, MOST_BLOCKS = 128, 16
"""Columns that a warp multiplies at a time, and the most such groups of a thread block."""
_MOST_UNITS, _MOST_PRODUCTS = 6, 16
"""The most units of a thread block, and the most units times row tiles: the registers of a thread hold no more sums."""
_SMALL_BYTES, _FEW_COLUMNS = 8 << 20, 2048
"""With up to 8 rows, few_rows_cuda.py is at least as fast for layers with fewer bytes and fewer columns."""
_LEAST_COLUMNS = 512
WARPS, _PAD = 8, 64
GPC = 16
"""The fewest multiprocessors of a GPC; the thread blocks of a cluster run in one GPC."""


class Division(NamedTuple):
    """How thread blocks divide a layer."""

    units: int  # groups of 16 weight rows in a tile
    cluster: int  # blocks that divide the columns of a tile
    tiles: int  # one cluster each

    def shared_bytes(self, columns: int, row_tiles: int, element_bytes: int = 1) -> int:
        own = ceil_div(columns // COLUMNS, self.cluster) * COLUMNS * element_bytes
        weights = UNIT * self.units * (own + _PAD)
        return max(weights, WARPS * self.units * row_tiles * 4 * 128)


@functools.cache
def divide(weight_rows: int, columns: int, sms: int) -> Division | None:
    """A division in which all thread blocks run at the same time, one per multiprocessor; None if there is none."""
    blocks = columns // COLUMNS
    for cluster in (1, 2, 4):
        most = sms if cluster == 1 else sms // GPC * (GPC // cluster)
        if not most or ceil_div(blocks, cluster) > MOST_BLOCKS:
            continue
        units = max(2, ceil_div(ceil_div(weight_rows, most), UNIT))
        if units <= _MOST_UNITS:
            return Division(units, cluster, ceil_div(weight_rows, UNIT * units))
    return None


def suits_at_once(x: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the kernel supports these rows and fp8 weights, and is faster than others."""
    if not x.is_cuda or x.itemsize != 2 or torch.cuda.get_device_capability(x.device) != (9, 0):
        return False
    weight_rows, columns = values.shape
    if not 1 <= len(x) <= MOST_ROWS or columns % COLUMNS or not values.is_contiguous():
        return False
    if values.data_ptr() % 16 or x.data_ptr() % 16:
        return False
    if columns < (_LEAST_COLUMNS if len(x) > _ROW_TILE or values.nbytes >= _SMALL_BYTES else _FEW_COLUMNS):
        return False
    division = divide(weight_rows, columns, multiprocessors(x.device))
    return division is not None and division.units * row_tiles_of(x) <= _MOST_PRODUCTS


def row_tiles_of(x: torch.Tensor) -> int:
    """The number of tiles of 8 rows that hold all of x, rounded up to a power of two."""
    tiles = 1
    while tiles * _ROW_TILE < len(x):
        tiles *= 2
    return tiles


def launch_at_once(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    row_group: int,
    gated: bool,
) -> None:
    """Fill `out` [rows, outputs], for tensors that `suits_at_once` accepts. `row_group` is that of Fp8Matrix."""
    division = divide(*values.shape, multiprocessors(x.device))
    assert division is not None, f"weights {list(values.shape)} do not fit the shared memory"
    row_tiles = row_tiles_of(x)
    constants = (
        ("UNITS", division.units),
        ("ROW_TILES", row_tiles),
        ("CLUSTER", division.cluster),
        ("GATED", int(gated)),
        ("BIAS", int(bias is not None)),
        ("HALF", int(x.dtype == torch.float16)),
    )
    shared_bytes = division.shared_bytes(x.shape[1], row_tiles)
    load_kernel("linear/fp8_at_once.cu", "fp8_at_once", x.device, constants, shared_bytes).launch(
        x.data_ptr(),
        values.data_ptr(),
        scales.data_ptr(),
        (out if bias is None else bias).data_ptr(),
        out.data_ptr(),
        len(x),
        out.shape[1],
        x.shape[1],
        row_group.bit_length() - 1,
        scales.stride(0),
        0 if scales.shape[1] == 1 else 1,
        blocks=division.cluster * division.tiles,
        threads=32 * WARPS,
        shared_bytes=shared_bytes,
        overlap_previous=True,
    )
