"""The setting cpu_kernels: which implementation `auto` selects for float32 on the CPU."""

from typing import Literal

import pytest
import torch

from pdserve.common.errors import StartupError
from pdserve.kernels.backends import dispatch
from pdserve.kernels.backends.dispatch import numba_computes, prepare_kernels
from pdserve.kernels.linear.swiglu import swiglu, swiglu_reference
from tests.kernels.numba_kernels import needs_numba

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def restored_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_numba_allowed", True)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Modules of the kernels that operations launch."""
    modules: list[str] = []
    find = dispatch.launcher

    def record(module: str, name: str) -> object:
        modules.append(module)
        return find(module, name)

    monkeypatch.setattr("pdserve.kernels.linear.swiglu.launcher", record)
    return modules


@needs_numba
@pytest.mark.parametrize(
    ("setting", "modules"), [("auto", ["numba.swiglu"]), ("numba", ["numba.swiglu"]), ("torch", [])]
)
def test_setting_selects_the_cpu_kernels(
    setting: Literal["auto", "numba", "torch"], modules: list[str], launched: list[str]
) -> None:
    prepare_kernels(CPU, torch.float32, setting)
    x = torch.randn(3, 64)
    torch.testing.assert_close(swiglu(x), swiglu_reference(x))
    assert launched == modules
    assert numba_computes() == bool(modules)


@needs_numba
def test_explicit_impl_ignores_the_setting(launched: list[str]) -> None:
    prepare_kernels(CPU, torch.float32, "torch")
    swiglu(torch.randn(3, 64), impl="numba")
    assert launched == ["numba.swiglu"]


def test_required_numba_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_numba_problem", lambda: "No module named 'numba'")
    with pytest.raises(StartupError, match=r"cpu_kernels = numba: No module named 'numba'; install .* extra cpu"):
        prepare_kernels(CPU, torch.float32, "numba")
    prepare_kernels(CPU, torch.float32, "auto")
    assert not numba_computes()


def test_setting_has_no_effect_on_other_devices_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_numba_problem", lambda: "No module named 'numba'")
    prepare_kernels(CPU, torch.bfloat16, "numba")
    prepare_kernels(torch.device("cuda", 0), torch.float32, "numba")
