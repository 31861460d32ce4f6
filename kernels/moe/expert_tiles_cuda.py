"""Launcher of csrc/moe/expert_tiles.cu: experts with fp8 weights and few tokens each, on Hopper."""

import torch

from ..backends.nvrtc import load_kernel
from ..backends.occupancy import multiprocessors
from ..linear.fp8_format import BLOCK, Fp8Matrix, Weight
from ..linear.row_tiles import RowTiles

TILE_ROWS = 8
"""Tokens of a tile."""
_MOST_AVERAGE = 4
"""Tokens per expert, on average, up to which the kernel is used: most experts then have one tile."""
_THREADS, _SHARED_BYTES, _BLOCKS_PER_PROCESSOR = 288, 113 << 10, 2
_WHOLE_COLUMNS = 256
"""With up to this many columns, one warp multiplies whole weight rows (WHOLE_ROWS)."""


def suits_expert_tiles(x: torch.Tensor, gate_up: Weight, down: Weight, average: int) -> bool:
    """Whether the kernel supports these tensors with `average` tokens per expert."""
    if not x.is_cuda or x.dtype.itemsize != 2 or torch.cuda.get_device_capability(x.device) != (9, 0):
        return False
    if not (isinstance(gate_up, Fp8Matrix) and isinstance(down, Fp8Matrix) and 1 <= average <= _MOST_AVERAGE):
        return False
    matrices = gate_up.values, down.values
    whole = all(matrix.shape[-1] % BLOCK == 0 and matrix.is_contiguous() for matrix in matrices)
    return whole and all(tensor.data_ptr() % 16 == 0 for tensor in (x, *matrices))


def launch_expert_tiles(
    x: torch.Tensor,
    gate_up: Fp8Matrix,
    down: Fp8Matrix,
    gated: torch.Tensor,
    results: torch.Tensor,
    tiles: RowTiles,
) -> None:
    """Fill `gated` [numbers, size] and `results` [numbers, hidden], for tensors that `suits_expert_tiles` accepts and
    tiles of TILE_ROWS. One function launches both kernels, because the second one reads the tiles while the first runs.
    """
    _launch(x, gate_up, gated, tiles, gated=True)
    _launch(gated, down, results, tiles, gated=False)


def _launch(x: torch.Tensor, weight: Fp8Matrix, out: torch.Tensor, tiles: RowTiles, *, gated: bool) -> None:
    whole_rows = not gated and x.shape[1] <= _WHOLE_COLUMNS
    constants = (
        ("GATED", int(gated)),
        ("WHOLE_ROWS", int(whole_rows)),
        ("HALF", int(x.dtype == torch.float16)),
    )
    kernel = load_kernel("moe/expert_tiles.cu", "expert_tiles", x.device, constants, _SHARED_BYTES)
    scales = weight.scales
    kernel.launch(
        x.data_ptr(),
        weight.values.data_ptr(),
        scales.data_ptr(),
        tiles.expert.data_ptr(),
        tiles.first.data_ptr(),
        tiles.ends.data_ptr(),
        tiles.order.data_ptr(),
        tiles.counts.data_ptr(),
        out.data_ptr(),
        tiles.per_token,
        out.shape[1],
        x.shape[1],
        weight.row_group.bit_length() - 1,
        scales.shape[-2],
        scales.shape[-1],
        0 if weight.by_row else 1,
        blocks=_BLOCKS_PER_PROCESSOR * multiprocessors(x.device),
        threads=_THREADS,
        shared_bytes=_SHARED_BYTES,
        overlap_previous=True,
    )
