"""Checks launches of csrc/ kernels against their declarations. The arguments of a launch are plain numbers, so neither
Python nor CUDA checks them.

With `compiling`, kernels are also compiled, for Hopper: NVRTC needs no GPU.
"""

import contextlib
import ctypes
import functools
import importlib.metadata
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from pdserve.kernels.backends.nvrtc import SOURCE_FOLDER

_NUMBERS_END = 1 << 32
"""In the launches of tests, sizes, strides and the bits of floats are below this. Addresses are above it, unless the
heap of this process begins below.
"""
_FIRST_ADDRESS = min(_NUMBERS_END, torch.empty(1).data_ptr() >> 1)


@functools.cache
def parameters(source: str, name: str) -> tuple[str, ...]:
    """The parameter types of kernel `name`, without qualifiers."""
    code = (SOURCE_FOLDER / source).read_text(encoding="utf-8")
    found = re.search(rf'extern "C" __global__[^;{{}}]*?\b{name}\(([^)]*)\)', code)
    assert found is not None, f"{source} has no kernel {name}"
    declared = [re.sub(r"\b(const|__restrict__)\b", "", part) for part in found[1].split(",")]
    return tuple(re.sub(r"\s*\w+\s*$", "", part).strip() for part in declared)


def check_launch(source: str, name: str, args: tuple[Any, ...]) -> None:
    """Raise AssertionError unless the kernel takes these arguments, addresses and 64-bit integers, in this order."""
    taken = parameters(source, name)
    assert len(args) == len(taken), f"{name} takes {len(taken)} arguments, not {len(args)}"
    for number, (arg, kind) in enumerate(zip(args, taken, strict=True)):
        assert type(arg) is int, f"argument {number} of {name} is {arg!r}, not an int, which is passed as 64 bits"
        assert kind.endswith("*") or kind == "long long", f"parameter {number} of {name} is {kind}"
        fits = arg >= _FIRST_ADDRESS if kind.endswith("*") else arg < _NUMBERS_END
        assert fits, f"argument {number} of {name}, {kind}, is {arg}"


_compiling = False


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """`load_kernel` compiles the kernels that it loads within this context."""
    global _compiling
    _compiling = True
    try:
        yield
    finally:
        _compiling = False


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The oldest NVRTC that the extras install. What it compiles, later ones compile too."""
    folder = importlib.metadata.distribution("nvidia-cuda-nvrtc-cu12").locate_file("nvidia/cuda_nvrtc/lib")
    return ctypes.CDLL(f"{folder}/libnvrtc.so.12")


@functools.cache
def _compile(source: str, architecture: str, constants: tuple[tuple[str, int], ...]) -> None:
    """Raise AssertionError with the compiler's log unless the source compiles."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    code = (SOURCE_FOLDER / source).read_bytes()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, source.encode(), 0, None, None) == 0
    options = [f"--gpu-architecture={architecture}", "--std=c++17", f"--include-path={SOURCE_FOLDER}"]
    options += [f"-D{macro}={value}" for macro, value in constants]
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert status == 0, log.value.decode()


def load_kernel(
    source: str,
    name: str,
    _device: torch.device | None = None,
    constants: tuple[tuple[str, int], ...] = (),
    _shared_bytes: int = 0,
    *,
    only_here: bool = False,
) -> Any:
    """Replaces load_kernel of nvrtc.py: checks launches, and runs nothing."""
    if _compiling:
        _compile(source, "sm_90a" if only_here else "sm_90", constants)

    def launch(*args: Any, blocks: int, threads: int, shared_bytes: int = 0, overlap_previous: bool = False) -> None:
        assert blocks > 0
        assert 0 < threads <= 1024
        assert 0 <= shared_bytes <= 227 << 10
        assert isinstance(overlap_previous, bool)
        check_launch(source, name, args)

    return SimpleNamespace(launch=launch)
