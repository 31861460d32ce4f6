"""Random GGUF blocks of every type."""

import numpy as np
import torch

from pdserve.kernels.gguf.blocks import GgufRows, block_size

_SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Byte offsets of the float16 scales in a block. Blocks of other types have one, at offset 0."""


def random_rows(rows: int, columns: int, type_name: str, seed: int = 0) -> GgufRows:
    """Random bits, and scales that give weights of order 1; some scales are negative, some subnormal."""
    random = np.random.default_rng(seed)
    elements, size_bytes = block_size(type_name)
    blocks = random.integers(0, 256, (rows, columns // elements, size_bytes), dtype=np.uint8)
    largest = {"Q8_0": 128, "Q6_K": 32 * 128, "Q5_K": 31 * 63, "Q4_K": 15 * 63}.get(type_name, 31)
    for at in _SCALES.get(type_name, (0,)):
        scales = random.standard_normal(blocks.shape[:2]) / largest
        scales[random.random(blocks.shape[:2]) < 0.05] = 3e-6
        blocks[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return GgufRows(torch.from_numpy(blocks.reshape(rows, -1)), type_name)
