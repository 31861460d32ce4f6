"""The checksum both sides of a transfer compute over the same tokens (`--verify-kv`)."""

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray


def checksum(data: torch.Tensor | NDArray[np.generic]) -> int:
    """XXH3-64 of the bytes of `data`, as an unsigned integer.

    `data` is a contiguous host tensor or array, such as `KvPool.read_tokens` returns: its order does not depend on page
    sizes, so equal tokens give equal sums on both sides. Raises ValueError for anything that would have to be copied.
    """
    if isinstance(data, torch.Tensor):
        if data.device.type != "cpu" or not data.is_contiguous():
            raise ValueError(f"checksum needs a contiguous host tensor, got {data.device}, strides {data.stride()}")
        # Through uint8, because numpy has no bfloat16.
        return xxhash.xxh3_64_intdigest(data.detach().reshape(-1).view(torch.uint8).numpy().data)
    if not data.flags.c_contiguous:
        raise ValueError(f"checksum needs a contiguous array, got strides {data.strides}")
    return xxhash.xxh3_64_intdigest(data.reshape(-1).view(np.uint8).data)
