"""Uploads index arrays to a device without waiting."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ...common.arithmetic import round_up

_ALIGNED = 4
"""Arrays start at multiples of 16 bytes: Triton would compile kernels again for unaligned pointers."""


def upload_array(array: "NDArray[np.int32] | NDArray[np.int64]", device: torch.device) -> torch.Tensor:
    """`array` on `device`, for work that is enqueued afterwards. The caller must not change `array` any more.

    The copy is from pinned memory: one from pageable memory would wait for all work enqueued before.
    """
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def upload_arrays(arrays: "Sequence[NDArray[np.int32]]", device: torch.device) -> list[torch.Tensor]:
    """Flat `arrays` on `device`, in one copy."""
    ends = np.cumsum([round_up(len(array), _ALIGNED) for array in arrays])
    packed = np.zeros(ends[-1], dtype=np.int32)
    starts = [0, *ends[:-1].tolist()]
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + len(array)] = array
    buffer = upload_array(packed, device)
    return [buffer[start : start + len(array)] for start, array in zip(starts, arrays, strict=True)]
