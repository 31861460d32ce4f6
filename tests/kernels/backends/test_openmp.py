"""How Numba kernels are run, cached and replaced by torch; their results are tested with each operation."""

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.kernels.attention.paged_attention import paged_attention, plan_attention
from pdserve.kernels.linear.linear import gated_linear, linear
from pdserve.kernels.linear.rms_norm import rms_norm
from pdserve.kernels.linear.swiglu import swiglu
from tests.cluster.servers import start_forked
from tests.kernels.poison import poisoned

numba = pytest.importorskip("numba", reason="needs Numba: it is not installed")
openmp = importlib.import_module("pdserve.kernels.numba.openmp")

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def attend(query: torch.Tensor) -> torch.Tensor:
    pool = torch.randn(100, 2, 3, 16, 64, generator=torch.Generator().manual_seed(1))
    pages = [list(range(60)), list(range(60, 63)), [70]]
    plan = plan_attention(
        [1, 1, 1], [950, 40, 2], pages, page_size=16, num_kv_heads=3, device=torch.device("cpu"), impl="numba"
    )
    return paged_attention(query.view(3, 9, 64), pool[:, 0], pool[:, 1], plan, scale=0.125)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: rms_norm(x, x[0].contiguous(), 1e-5, impl="numba"),
        lambda x: swiglu(x, impl="numba"),
        lambda x: linear(x, x.repeat(70, 1), impl="numba"),
        lambda x: gated_linear(x, x.repeat(70, 1), impl="numba"),
        attend,
    ],
    ids=["rms_norm", "swiglu", "linear", "gated_linear", "attention"],
)
@pytest.mark.parametrize("threads", [2, 3])
def test_result_does_not_depend_on_the_number_of_threads(
    operation: Callable[[torch.Tensor], torch.Tensor], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise, except attention, which sums in another order."""
    monkeypatch.setattr(openmp, "_THREAD_ELEMENTS", 1)
    teams: list[int] = []
    run = openmp.Kernel.__call__

    def record(self: Any, *arguments: float, threads: int) -> None:
        teams.append(threads)
        run(self, *arguments, threads=threads)

    monkeypatch.setattr(openmp.Kernel, "__call__", record)
    x = torch.randn(3, 576, generator=torch.Generator().manual_seed(0))
    torch.set_num_threads(1)
    alone = operation(x)
    torch.set_num_threads(threads)
    with poisoned("numba"):
        together = operation(x)
    assert teams == [1, threads]
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6 if operation is attend else 0)


def test_exp_is_good_to_one_unit_in_the_last_place() -> None:
    x = np.linspace(-87, 88, 200_001, dtype=np.float32)
    found = np.array([openmp.exp(value) for value in x[::50]], dtype=np.float64)
    exact = np.exp(x[::50].astype(np.float64))
    assert (np.abs(found - exact) / np.spacing(exact.astype(np.float32))).max() <= 1.1
    assert np.isnan(openmp.exp(np.float32("nan")))
    assert openmp.exp(np.float32("inf")) == np.inf
    assert openmp.exp(np.float32(-1e30)) < 2e-38


def run_python(source: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / '.dev'}", "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


KERNEL = """
from pdserve.kernels.numba import openmp

@openmp.kernel("out count")
def count_up(arguments):
    a = openmp.fields(arguments)
    out = openmp.floats(a.out, a.count)
    first, last = openmp.share(a.count)
    for at in range(first, last):
        out[at] = at
"""


def compile_in_processes(function: str, cache: Path, modules: Path) -> list[str]:
    """The lines that a function of compiling.py prints."""
    process, stdin, stdout = start_forked(f"tests.kernels.backends.compiling:{function}", str(cache), str(modules))
    with stdin, stdout:
        lines = stdout.read().splitlines()
    assert process.wait(timeout=120) == 0
    return lines


def test_processes_can_compile_at_the_same_time(tmp_path: Path) -> None:
    """All compute correct results, and a later process loads the kernel from the cache. The kernel is small, so it
    compiles quickly.
    """
    (tmp_path / "small_kernel.py").write_text(KERNEL)
    *first, last = compile_in_processes("compile_one", tmp_path / "cache", tmp_path)
    assert len(first) == 2
    assert set(first) <= {"0", "1"}
    assert last == "1"
    assert list((tmp_path / "cache").rglob("*.nbi"))


def test_processes_divide_the_kernels_among_themselves(tmp_path: Path) -> None:
    """Each kernel is compiled once, and loaded from the cache by the others."""
    kernels = [KERNEL.replace("count_up", f"count_{number}") for number in range(4)]
    names = ", ".join(f"count_{number}" for number in range(4))
    (tmp_path / "many_kernels.py").write_text("\n".join((*kernels, f"ALL = {names}")))
    lines = compile_in_processes("compile_all", tmp_path / "cache", tmp_path)
    hits = [[int(number) for number in line.split()] for line in lines]
    assert [sum(of_kernel) for of_kernel in zip(*hits, strict=True)] == [2] * 4


def test_torch_computes_if_numba_is_missing() -> None:
    source = (
        "import sys; sys.modules['numba'] = None; import torch;"
        "from pdserve.kernels.backends.dispatch import numba_computes, prepare_kernels;"
        "from pdserve.kernels.linear.rms_norm import rms_norm, rms_norm_reference;"
        "prepare_kernels(torch.device('cpu'), torch.float32); x = torch.randn(3, 64);"
        "print(numba_computes(), rms_norm(x, x[0], 1e-5).equal(rms_norm_reference(x, x[0], 1e-5)))"
    )
    assert run_python(source).communicate(timeout=120)[0] == "False True\n"


def test_kernel_is_compiled_without_a_cache_folder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return numba.cfunc(*arguments, **options)

    def body(arguments):  # type: ignore[no-untyped-def]
        a = openmp.fields(arguments)
        openmp.floats(a.out, 1)[0] = a.value

    monkeypatch.setattr(openmp, "cfunc", refuse)
    out = torch.zeros(1)
    with caplog.at_level(logging.WARNING):
        openmp.kernel("out", "value")(body)(out.data_ptr(), 2.5, threads=1)
    assert out.item() == 2.5
    assert "body is compiled again at every start" in caplog.text
