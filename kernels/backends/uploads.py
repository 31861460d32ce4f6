"""Uploads index arrays to a device without waiting."""

import numpy as np
import torch
from numpy.typing import NDArray


def upload_array(array: "NDArray[np.int32] | NDArray[np.int64]", device: torch.device) -> torch.Tensor:
    """`array` on `device`, for work that is enqueued afterwards. The caller must not change `array` any more.

    The copy is from pinned memory: one from pageable memory would wait for all work enqueued before.
    """
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
