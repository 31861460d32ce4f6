"""What the kernel tests are parametrised over: an implementation and the device it runs on."""

import pytest
import torch

from tests.kernels.places import PLACES, each_of

where = each_of(*PLACES)
anywhere = each_of(*PLACES, ("numba", "cpu"))
"""`where`, and Numba: for operations that have such kernels. Those are for float32 alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop what would ask a Numba kernel for another dtype."""
    items[:] = [item for item in items if not _wrong_dtype(item)]


def _wrong_dtype(item: pytest.Item) -> bool:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    wrong_dtype = parameters.get("dtype", torch.float32) != torch.float32
    return wrong_dtype and parameters.get("anywhere") == ("numba", torch.device("cpu"))
