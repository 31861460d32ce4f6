"""Small values between host and device, at the cost of one wait per step.

A plain copy to or from a CUDA device waits for all work queued there. Uploads go through pinned memory instead, which
does not wait, and the results of a step come back together.
"""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

Values = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]]


def upload(values: Values | npt.NDArray[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` as a tensor on `device`, ready for work queued after it."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def read_back(tensors: Sequence[torch.Tensor]) -> list[list[float]]:
    """The values of each tensor, flattened, after a single wait. Integers are exact up to 2^53."""
    values: list[float] = torch.cat([tensor.reshape(-1).double() for tensor in tensors]).tolist()
    lists, start = [], 0
    for tensor in tensors:
        lists.append(values[start : start + tensor.numel()])
        start += tensor.numel()
    return lists
