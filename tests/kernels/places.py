"""Where kernel tests run: an implementation, the device it runs on and, for some, a dtype."""

from typing import Any

import pytest
import torch

from tests.kernels.interpreter import INTERPRETED
from tests.kernels.numba_kernels import needs_numba

Place = tuple[str, str] | tuple[str, str, torch.dtype]

PLACES: list[Place] = [("reference", "cpu"), ("auto", "cpu"), ("reference", "cuda"), ("triton", "cuda")]
"""Most kernels run in these."""

_NEEDS_TRITON = pytest.mark.skipif(not INTERPRETED, reason="needs triton")


def each_of(*places: Place) -> Any:
    """A fixture of (impl, device) or (impl, device, dtype). Triton on a CPU is Triton's interpreter."""

    @pytest.fixture(params=[_parameter(*place) for place in places])
    def where(request: pytest.FixtureRequest) -> Any:
        return request.param

    return where


def _parameter(impl: str, device: str, dtype: torch.dtype | None = None) -> Any:
    marks = [pytest.mark.gpu] if device == "cuda" else []
    if impl == "numba":
        marks.append(needs_numba)
    if (impl, device) == ("triton", "cpu"):
        marks.append(_NEEDS_TRITON)
    value = (impl, torch.device(device))
    if dtype is None:
        return pytest.param(value, id=f"{impl}-{device}", marks=marks)
    return pytest.param((*value, dtype), id=f"{impl}-{device}-{str(dtype).removeprefix('torch.')}", marks=marks)
