"""Index arrays from the host to a device, without a wait."""

import numpy as np
import torch
from numpy.typing import NDArray


def upload_array(array: "NDArray[np.int32] | NDArray[np.int64]", device: torch.device) -> torch.Tensor:
    """`array`, which nobody changes afterwards, on `device`: ready for work queued after it.

    A plain copy of pageable memory would wait for everything queued before.
    """
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
