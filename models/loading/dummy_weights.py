"""Random weights instead of a checkpoint's, to benchmark a geometry without its files (`--load-format dummy`).

An element depends only on its tensor's name, its position in it and the device type: all servers of a cluster have the
same model, however each divides it among its ranks. Matrices are N(0, 1 / fan_in), so that activations stay of order 1
through any number of layers.
"""

import hashlib
from collections.abc import Mapping

import torch

from ...configs.arithmetic import ceil_div
from ..decoders.dense_parameters import Slot

_BLOCK_ROWS = 1024
"""Rows per random seed: a rank generates few rows that it does not hold."""


def fill_with_noise(slots: Mapping[str, Slot]) -> None:
    """Fill every slot (dense_parameters.py) on its device, a block of rows at a time."""
    for name, slot in slots.items():
        mean, spread = _distribution(name, slot.shape)
        first, last = slot.start[0], slot.start[0] + slot.target.shape[0]
        columns = tuple(
            slice(start, start + size) for start, size in zip(slot.start[1:], slot.target.shape[1:], strict=True)
        )
        for block in range(first // _BLOCK_ROWS, ceil_div(last, _BLOCK_ROWS)):
            start, end = block * _BLOCK_ROWS, min((block + 1) * _BLOCK_ROWS, slot.shape[0])
            drawn = torch.empty((end - start, *slot.shape[1:]), dtype=torch.float32, device=slot.target.device)
            drawn.normal_(mean, spread, generator=_generator(name, block, drawn.device))
            held = slice(max(first, start), min(last, end))
            part = drawn[held.start - start : held.stop - start]
            slot.target[held.start - first : held.stop - first].copy_(part[(slice(None), *columns)])


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a tensor of this name."""
    if len(shape) == 1:
        return (0.0, 0.1) if name.endswith("bias") else (1.0, 0.1)
    return 0.0, 1.0 if name.endswith("embed_tokens.weight") else shape[-1] ** -0.5


def _generator(name: str, block: int, device: torch.device) -> torch.Generator:
    seed = int.from_bytes(hashlib.blake2b(f"{name} {block}".encode(), digest_size=8).digest(), "little")
    return torch.Generator(device).manual_seed(seed)
