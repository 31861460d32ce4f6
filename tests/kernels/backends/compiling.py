"""Compiles Numba kernels in several processes at the same time. The fork server runs these functions; it has imported
torch and Numba. Their arguments are a cache folder, and a folder with the module of the kernels.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numba
import torch

from pdserve.kernels.numba import openmp


def compile_one(arguments: Sequence[str]) -> int:
    """`small_kernel.count_up`, in two processes and then in a third. Each prints whether it was cached."""
    _use(*arguments)

    def compute() -> list[int]:
        count_up: Any = importlib.import_module("small_kernel").count_up
        out = torch.zeros(100)
        count_up(out.data_ptr(), 100, threads=1)
        assert out.equal(torch.arange(100.0))
        return [count_up._code.cache_hits]

    return _run_processes(2, compute) or _run_processes(1, compute)


def compile_all(arguments: Sequence[str]) -> int:
    """`many_kernels.ALL`, in three processes. Each prints which of them were cached."""
    _use(*arguments)

    def compile_kernels() -> list[int]:
        kernels: Any = importlib.import_module("many_kernels").ALL
        openmp.compile_kernels()
        return [each._code.cache_hits for each in kernels]

    return _run_processes(3, compile_kernels)


def _use(cache: str, modules: str) -> None:
    os.environ["NUMBA_CACHE_DIR"] = numba.config.CACHE_DIR = cache
    sys.path.append(modules)


def _run_processes(count: int, work: Callable[[], list[int]]) -> int:
    """Print the numbers of each process in a line; returns 0 if none has failed."""
    pids = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.write(1, f"{' '.join(map(str, work()))}\n".encode())  # in one piece: several processes write
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    return int(any(os.waitpid(pid, 0)[1] for pid in pids))
