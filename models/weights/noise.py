"""Random numbers for weights that are drawn instead of read (loading/dummy_weights.py): they depend only on the name of
a tensor, the position in it and the device type.
"""

import hashlib
from collections.abc import Iterator

import torch

from ...common.arithmetic import ceil_div
from .slots import Slot

_BLOCK_ROWS = 1024
"""Rows per random seed: a rank generates few rows that it does not hold."""


def draw_rows(name: str, slot: Slot, mean: float, spread: float) -> Iterator[tuple[slice, int, torch.Tensor]]:
    """Rows of the slot, the number of the first one in the checkpoint tensor, and their random values in float32."""
    first, last = slot.start[0], slot.start[0] + slot.size[0]
    columns = tuple(slice(start, start + size) for start, size in zip(slot.start[1:], slot.size[1:], strict=True))
    for block in range(first // _BLOCK_ROWS, ceil_div(last, _BLOCK_ROWS)):
        start, end = block * _BLOCK_ROWS, min((block + 1) * _BLOCK_ROWS, slot.shape[0])
        drawn = torch.empty((end - start, *slot.shape[1:]), dtype=torch.float32, device=slot.target.device)
        drawn.normal_(mean, spread, generator=generator(name, block, drawn.device))
        held = slice(max(first, start), min(last, end))
        part = drawn[held.start - start : held.stop - start]
        yield slice(held.start - first, held.stop - first), held.start, part[(slice(None), *columns)]


def generator(name: str, block: int | str, device: torch.device) -> torch.Generator:
    """Of a block of rows of a tensor, or of another part of it."""
    seed = int.from_bytes(hashlib.blake2b(f"{name} {block}".encode(), digest_size=8).digest(), "little")
    return torch.Generator(device).manual_seed(seed)
