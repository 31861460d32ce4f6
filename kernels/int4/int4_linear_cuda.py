"""Launcher of csrc/int4_linear.cu."""

from dataclasses import dataclass

import torch

from ...configs.arithmetic import ceil_div
from ..backends.nvrtc import load_kernel
from .group_format import GroupScaled

ROW_TILE, OUTPUT_TILE = 8, 16
"""Rows of x and of the weights that one product has."""
MOST_ROWS = 32
"""Rows of x of a block. Of more rows, each tile reads the weights again, mostly from the L2 cache."""


@dataclass(frozen=True)
class Tiles:
    """How a fused kernel divides its work; None: chosen by the launcher."""

    outputs: int | None = None  # rows of the weights of a program
    splits: int | None = None  # programs that divide the columns
    stages: int | None = None  # blocks of weights in flight
    warps: int | None = None


def launch_int4_linear_cuda(
    x: torch.Tensor,
    weight: GroupScaled,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    gated: bool,
    tiles: Tiles,
) -> None:
    """Fill `out` [rows, outputs]; x has 16 bits and at least one row. `splits` and `stages` do not apply."""
    row_tiles = 1
    while row_tiles * ROW_TILE < min(len(x), MOST_ROWS):
        row_tiles *= 2
    outputs = tiles.outputs or OUTPUT_TILE
    warps = tiles.warps or 8
    constants = (
        ("GROUP", weight.group),
        ("WARPS", warps),
        ("OUTPUT_TILES", outputs // OUTPUT_TILE),
        ("ROW_TILES", row_tiles),
        ("GATED", int(gated)),
        ("BIAS", int(bias is not None)),
        ("HALF", int(x.dtype == torch.float16)),
    )
    kernel = load_kernel("int4_linear.cu", "int4_linear", x.device, constants)
    kernel.launch(
        x.data_ptr(),
        weight.packed.data_ptr(),
        weight.scales.data_ptr(),
        weight.zeros.data_ptr(),
        (out if bias is None else bias).data_ptr(),
        out.data_ptr(),
        len(x),
        out.shape[1],
        weight.columns,
        weight.packed.shape[1],
        weight.scales.stride(0),
        blocks=ceil_div(len(weight), outputs) * ceil_div(len(x), row_tiles * ROW_TILE),
        threads=32 * warps,
        overlap_previous=True,
    )
