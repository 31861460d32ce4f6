"""Moves small values between host and device, with one wait per step.

A plain copy to or from a CUDA device waits for all work queued there. Uploads go through pinned memory instead, which
does not wait, and all results of a step are read back together.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy.typing as npt
import torch

Values = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]]


def upload(values: Values | npt.NDArray[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` as a tensor on `device`, for work that is enqueued afterwards."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class UploadBuffer:
    """A host array [rows, columns] that is filled and uploaded again and again. Its memory is pinned once: to pin
    memory, CUDA waits for all work on the device.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.empty(rows, columns, dtype=dtype, pin_memory=device.type == "cuda")
        self._device = device
        self._uploaded: torch.cuda.Event | None = None

    def rows(self, count: int) -> npt.NDArray[Any]:
        """The first rows, to be filled; waits until their previous values have been uploaded."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
        return self._host[:count].numpy()

    def upload(self, count: int) -> torch.Tensor:
        """The first rows on the device, for work that is enqueued afterwards."""
        values = self._host[:count].to(self._device, non_blocking=True, copy=True)
        if self._device.type == "cuda":
            self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._uploaded.record(torch.cuda.current_stream(self._device))
        return values


class ReadBack:
    """The values of some tensors, on their way to the host. A call waits for them, but not for later work."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sizes = [tensor.numel() for tensor in tensors]
        self._event: torch.cuda.Event | None = None
        if not tensors:
            self._values = torch.empty(0, dtype=torch.double)
            return
        joined = torch.cat([tensor.reshape(-1).double() for tensor in tensors])
        if joined.device.type == "cuda":
            self._values = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
            self._values.copy_(joined, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._event.record(torch.cuda.current_stream(joined.device))
        else:
            self._values = joined

    def __call__(self) -> list[list[float]]:
        """A list per tensor, flattened. Integers are exact up to 2^53."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._values.tolist()
        ends = list(accumulate(self._sizes))
        return [values[end - size : end] for size, end in zip(self._sizes, ends, strict=True)]
