"""What the kernel tests are parametrised over: an implementation and the device it runs on."""

import pytest
import torch

from pdserve.kernels.dispatch import Impl
from tests.kernels.numba_kernels import needs_numba

PLACES = [
    pytest.param(("reference", "cpu"), id="reference-cpu"),
    pytest.param(("auto", "cpu"), id="auto-cpu"),
    pytest.param(("reference", "cuda"), id="reference-cuda", marks=pytest.mark.gpu),
    pytest.param(("triton", "cuda"), id="triton-cuda", marks=pytest.mark.gpu),
]
NUMBA = ("numba", "cpu")


@pytest.fixture(params=PLACES)
def where(request: pytest.FixtureRequest) -> tuple[Impl, torch.device]:
    impl, device = request.param
    return impl, torch.device(device)


@pytest.fixture(params=[*PLACES, pytest.param(NUMBA, id="numba-cpu", marks=needs_numba)])
def anywhere(request: pytest.FixtureRequest) -> tuple[Impl, torch.device]:
    """`where`, and Numba: for operations that have such kernels. Those are for float32 alone."""
    impl, device = request.param
    return impl, torch.device(device)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop what would ask a Numba kernel for another dtype."""
    items[:] = [item for item in items if not _wrong_dtype(item)]


def _wrong_dtype(item: pytest.Item) -> bool:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return parameters.get("anywhere") == NUMBA and parameters.get("dtype", torch.float32) != torch.float32
