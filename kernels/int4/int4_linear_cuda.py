"""Launcher of csrc/int4_linear.cu, for x of few rows in 16 bits."""

from dataclasses import dataclass

import torch

from ...configs.arithmetic import ceil_div
from ..backends.nvrtc import load_kernel
from ..backends.occupancy import multiprocessors, shared_memory
from .group_format import GroupScaled

ROW_TILE, OUTPUT_TILE = 8, 16
"""Rows of x and of the weights that one product has."""
MOST_ROWS = 32
"""Rows of x of a block. Of more rows, each tile reads the weights again, mostly from the L2 cache."""

LEAST_STAGES = 2
"""Of a ring: one is filled while another is read."""


@dataclass(frozen=True)
class Tiles:
    """How a fused kernel divides its work; None: chosen by the launcher."""

    outputs: int | None = None  # rows of the weights of a program
    splits: int | None = None  # programs that divide the columns
    stages: int | None = None  # blocks of weights in shared memory
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
    """Fill `out` [rows, outputs]; for tensors that `suits_cuda` accepts. `splits` does not apply."""
    row_tiles = 1
    while row_tiles * ROW_TILE < min(len(x), MOST_ROWS):
        row_tiles *= 2
    outputs = tiles.outputs or 2 * OUTPUT_TILE
    output_tiles = outputs // OUTPUT_TILE
    count = ceil_div(len(weight), outputs) * ceil_div(len(x), row_tiles * ROW_TILE)
    processors = multiprocessors(x.device)
    limit = shared_memory(x.device)
    warps, stages, shared_bytes = _fit(
        tiles, count, weight.group, output_tiles, row_tiles, processors=processors, limit=limit
    )
    constants = (
        ("GROUP", weight.group),
        ("WARPS", warps),
        ("STAGES", stages),
        ("OUTPUT_TILES", output_tiles),
        ("ROW_TILES", row_tiles),
        ("GATED", int(gated)),
        ("BIAS", int(bias is not None)),
        ("HALF", int(x.dtype == torch.float16)),
    )
    assert weight.zeros is not None, "MXFP4 has only kernels of experts"
    kernel = load_kernel("int4_linear.cu", "int4_linear", x.device, constants, shared_bytes)
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
        blocks=min(count, processors * (limit // shared_bytes)),
        threads=32 * warps,
        shared_bytes=shared_bytes,
        overlap_previous=True,
    )


def _fit(
    tiles: Tiles, count: int, group: int, output_tiles: int, row_tiles: int, *, processors: int, limit: int
) -> tuple[int, int, int]:
    """Warps, stages and shared memory of a block, of which `limit` bytes exist, for `count` tiles. The more tiles, the
    fewer warps divide the columns of one.
    """
    many = count >= 4 * processors
    warps = tiles.warps or (4 if many else 16 if count <= processors else 8)
    while True:
        stage_bytes = warps * output_tiles * (OUTPUT_TILE * group + 128)
        sum_bytes = 2 * warps * output_tiles * row_tiles * 4 * 128
        stages = min(tiles.stages or (3 if many else 5), (limit - sum_bytes) // stage_bytes)
        if stages >= LEAST_STAGES:
            return warps, stages, stages * stage_bytes + sum_bytes
        warps //= 2


def suits_cuda(x: torch.Tensor, weight: GroupScaled) -> bool:
    """Whether the kernel can multiply them. It copies 8 scales at a time, so they must begin at 16 bytes."""
    aligned = weight.scales.stride(0) % 8 == 0 and weight.scales.data_ptr() % 16 == 0
    return x.is_cuda and x.itemsize == 2 and len(weight) % 16 == 0 and aligned
