"""Launcher of the kernels for linear layers with few rows of x: csrc/linear/few_rows.cuh."""

import functools
from dataclasses import dataclass

import torch

from ...common.arithmetic import ceil_div
from .nvrtc import load_kernel
from .occupancy import multiprocessors, shared_memory

ROW_TILE, OUTPUT_TILE = 8, 16
"""Rows of x and of the weights in one mma instruction."""
MOST_ROWS = 32
"""Rows of x that a thread block computes at a time. With more rows, the weights are read again, mostly from L2."""

LEAST_STAGES = 2
"""Stages of a ring: one is filled while another is read."""


@functools.cache
def can_run(device: torch.device) -> bool:
    """Whether a GPU has the instructions of these kernels: compute capability 8.0 and later."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(frozen=True)
class Tiles:
    """How a kernel divides its work; the launcher chooses what is None."""

    outputs: int | None = None  # weight rows of a tile
    stages: int | None = None  # of a ring
    warps: int | None = None  # warps that divide the columns of a tile


@dataclass(frozen=True)
class Format:
    """A kernel for weights in one format. Its arguments are x, the weights, bias, result, three sizes, and more sizes
    of the weights.
    """

    name: str  # of the kernel and of its source
    step_bytes: int  # shared memory for one step of OUTPUT_TILE weight rows
    x_rows: int = ROW_TILE  # rows of x of a product
    x_bytes: int = 0  # of x in shared memory
    warps: tuple[int, int, int] = (16, 16, 16)  # for few tiles, some, and many
    stages: tuple[int, int, int] = (5, 5, 3)  # of a ring, likewise
    constants: tuple[tuple[str, int], ...] = ()
    folder: str = "linear"  # of csrc/


def launch_few_rows(
    form: Format,
    x: torch.Tensor,
    weights: tuple[int, ...],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *sizes: int,
    steps: int,
    gated: bool,
    tiles: Tiles | None = None,
) -> None:
    """Fill `out` [rows, outputs] from the weights at these addresses; a weight row has `steps` steps."""
    if len(x) == 0:
        return
    tiles = tiles or Tiles()
    row_tiles = 1
    while row_tiles * form.x_rows < min(len(x), MOST_ROWS):
        row_tiles *= 2
    weight_rows = out.shape[1] * (2 if gated else 1)
    outputs = tiles.outputs or (1 if weight_rows <= OUTPUT_TILE * multiprocessors(x.device) else 2) * OUTPUT_TILE
    output_tiles = outputs // OUTPUT_TILE
    count = ceil_div(weight_rows, outputs) * ceil_div(len(x), row_tiles * form.x_rows)
    launch_tiles(
        f"{form.folder}/{form.name}.cu",
        form.name,
        form,
        x,
        (
            *weights,
            (out if bias is None else bias).data_ptr(),
            out.data_ptr(),
            len(x),
            out.shape[1],
            x.shape[1],
            *sizes,
        ),
        count=count,
        steps=steps,
        gated=gated,
        bias=int(bias is not None),
        output_tiles=output_tiles,
        row_tiles=row_tiles,
        tiles=tiles,
    )


def launch_tiles(
    source: str,
    name: str,
    form: Format,
    x: torch.Tensor,
    arguments: tuple[int, ...],
    constants: tuple[tuple[str, int], ...] = (),
    *,
    count: int,
    steps: int,
    gated: bool,
    bias: int,
    output_tiles: int = 1,
    row_tiles: int = 1,
    tiles: Tiles | None = None,
) -> None:
    """Launch kernel `name` of a source in csrc/ for `count` tiles, with x and then `arguments`, and with
    `constants` besides those of csrc/linear/few_rows.cuh.
    """
    processors, limit = multiprocessors(x.device), shared_memory(x.device)
    warps, stages, shared_bytes = _fit(
        form, tiles or Tiles(), count, steps, output_tiles, row_tiles, processors=processors, limit=limit
    )
    constants = (
        *form.constants,
        ("WARPS", warps),
        ("STAGES", stages),
        ("OUTPUT_TILES", output_tiles),
        ("ROW_TILES", row_tiles),
        ("X_ROWS", form.x_rows),
        ("GATED", int(gated)),
        ("BIAS", bias),
        ("HALF", int(x.dtype == torch.float16)),
        *constants,
    )
    kernel = load_kernel(source, name, x.device, constants, shared_bytes)
    kernel.launch(
        x.data_ptr(),
        *arguments,
        blocks=min(count, processors * (limit // shared_bytes)),
        threads=32 * warps,
        shared_bytes=shared_bytes,
        overlap_previous=True,
    )


def _fit(
    form: Format,
    tiles: Tiles,
    count: int,
    steps: int,
    output_tiles: int,
    row_tiles: int,
    *,
    processors: int,
    limit: int,
) -> tuple[int, int, int]:
    """Warps, stages and bytes of shared memory of a thread block for `count` tiles, within `limit` bytes. More than
    half of the warps get a step of each tile.
    """
    size = 0 if count <= processors else 1 if count < 4 * processors else 2  # few tiles, some, or many
    warps = tiles.warps or form.warps[size]
    while True:
        stage_bytes = warps * output_tiles * form.step_bytes
        other_bytes = form.x_bytes + 2 * warps * output_tiles * row_tiles * form.x_rows // 2 * 128  # x, and sums
        stages = min(tiles.stages or form.stages[size], (limit - other_bytes) // stage_bytes)
        if stages >= LEAST_STAGES and (warps == 1 or tiles.warps or steps > warps // 2):
            return warps, stages, stages * stage_bytes + other_bytes
        warps //= 2
