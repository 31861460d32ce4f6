"""Fixtures of the kernel tests: an implementation and the device that it runs on."""

import pytest
import torch

from tests.kernels.places import PLACES, each_of

where = each_of(*PLACES)
anywhere = each_of(*PLACES, ("numba", "cpu"))
"""`where`, and Numba: for operations with a Numba kernel, which supports only float32."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deselect Numba kernels with other dtypes than float32."""
    items[:] = [item for item in items if not _wrong_dtype(item)]


def _wrong_dtype(item: pytest.Item) -> bool:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    wrong_dtype = parameters.get("dtype", torch.float32) != torch.float32
    return wrong_dtype and parameters.get("anywhere") == ("numba", torch.device("cpu"))
