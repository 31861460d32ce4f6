"""Interleaves the blocks of 16 rows, for processors with AVX or NEON. A register then holds the same columns of 16 rows
(NEON: four), so products need no sum across lanes, and one instruction converts the scales of all rows.

Weights keep their bits and take the same memory. A tile has 32 columns of a group of 16 rows:

    scales and offsets   float16 of each row
    integers             in passes v = 0, 1, ...: 32 bits of each row, two 16-bit words with 4 integers of 4 bits or 2
                         of 8. Integer s of word h is that of column 2 * (v * (integers of a word) + s) + h

so that shifts and masks give pairs of adjacent columns, which one instruction of AVX-512 multiplies with a pair of x
and adds. Those of NEON take four bytes of a row; x is arranged for them.
"""

import torch

from ..backends.dispatch import NEON, has_interleaved_kernels, numba_computes

GROUP_ROWS = 16
TILE_COLUMNS = 32

HALVES = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1}
"""Float16 values at the beginning of a block of the types that can be interleaved; the integers follow."""
SMALLEST = 1e-34
"""If 32 elements of x are all smaller, they count as 0."""
LARGEST = 127 * 256 + 127 if NEON else 32767
"""The largest integer that x is rounded to. With NEON an integer consists of two signed bytes."""
_CHUNK_GROUPS = 64
"""Groups that are rearranged at a time, to limit temporary memory."""


def interleaves(type_name: str, rows: int) -> bool:
    """Whether `rows` rows of a type are stored interleaved on this machine."""
    fits = type_name in HALVES and rows > 0 and rows % GROUP_ROWS == 0
    return fits and has_interleaved_kernels() and numba_computes()


def interleave(blocks: torch.Tensor, type_name: str) -> None:
    """Rearrange rows of blocks [rows, bytes] in place."""
    size_bytes, halves_bytes = _tile_bytes(type_name)
    for first in range(0, len(blocks), _CHUNK_GROUPS * GROUP_ROWS):
        chunk = blocks[first : first + _CHUNK_GROUPS * GROUP_ROWS]
        groups = len(chunk) // GROUP_ROWS
        stored = chunk.view(groups, GROUP_ROWS, -1, size_bytes)
        halves = torch.unflatten(stored[..., :halves_bytes], -1, (-1, 2)).permute(0, 2, 3, 1, 4)
        units = _units(stored[..., halves_bytes:], type_name).permute(0, 2, 3, 1)  # [group, tile, pass, row]
        integers = units.contiguous().view(torch.uint8)
        chunk.copy_(torch.cat((halves.flatten(2), integers.flatten(2)), dim=2).view_as(chunk))


def plain_rows(blocks: torch.Tensor, type_name: str, indices: torch.Tensor) -> torch.Tensor:
    """These rows of interleaved blocks as a GGUF file stores them, [len(indices), bytes]."""
    size_bytes, halves_bytes = _tile_bytes(type_name)
    tiles = blocks.view(len(blocks) // GROUP_ROWS, -1, GROUP_ROWS * size_bytes)
    split = GROUP_ROWS * halves_bytes
    group, row = indices // GROUP_ROWS, indices % GROUP_ROWS
    halves = torch.unflatten(tiles[..., :split], -1, (-1, GROUP_ROWS, 2))[group, :, :, row]
    # [index, tile, pass, h, byte]
    words = torch.unflatten(tiles[..., split:], -1, (-1, GROUP_ROWS, 2, 2))[group, :, :, row]
    if type_name == "Q8_0":
        integers = words.transpose(-1, -2).flatten(2)
    else:
        codes = torch.stack((words & 15, words >> 4), dim=-1).flatten(-2)  # [index, tile, pass, h, s]
        low, high = codes.transpose(-1, -2).flatten(2).chunk(2, dim=2)
        integers = low | high << 4
    return torch.cat((halves.flatten(2), integers), dim=2).flatten(1)


def _tile_bytes(type_name: str) -> tuple[int, int]:
    """Bytes of a block and of the float16 at its beginning."""
    halves_bytes = 2 * HALVES[type_name]
    return halves_bytes + (TILE_COLUMNS if type_name == "Q8_0" else TILE_COLUMNS // 2), halves_bytes


def _units(stored: torch.Tensor, type_name: str) -> torch.Tensor:
    """The 32 bits of a row in a pass, int32 [..., pass], from the bytes of blocks."""
    if type_name == "Q8_0":
        columns = stored.contiguous().view(*stored.shape[:-1], -1, 4)
        words = [columns[..., at] for at in (0, 2, 1, 3)]
    else:
        columns = torch.cat((stored & 15, stored >> 4), dim=-1).view(*stored.shape[:-1], -1, 8)
        words = [columns[..., at] | columns[..., at + 2] << 4 for at in (0, 4, 1, 5)]
    return torch.stack(words, dim=-1).view(torch.int32).squeeze(-1)
