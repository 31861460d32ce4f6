"""Kernels for CPU tensors: compiled by Numba, run on the threads that torch computes with.

A kernel is a function of one record of arguments, which every thread of a team calls; `share` says which part of the
work is its own. The team is one of the OpenMP runtime that torch itself is linked with: threads of a second pool would
fight for the cores with torch's, which keep spinning for a while after each operation.

Compiled code is kept in the user's cache folder, or in NUMBA_CACHE_DIR. Beside the source, where Numba would put it, it
would outlive the package. Processes that compile a kernel at the same time write the same file, each as a whole.
Importing this module raises ImportError where Numba or torch's OpenMP runtime is missing.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import ctypes
import logging
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from numba import carray, cfunc, from_dtype, njit, types
from numba.extending import intrinsic

log = logging.getLogger(__name__)

_THREAD_ELEMENTS = 8192
"""To wake a thread takes as long as to work on this many elements."""

_ARITHMETIC = {"fastmath": {"contract", "nsz", "reassoc"}, "error_model": "numpy"}
"""Sums may be added up in any order and with fused products; nothing is approximated, infinities and NaN stay what they
are, and a division by zero is one of them."""


def _cache_folder() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return str(Path(base).expanduser() / "pdserve" / "kernels")


numba.config.CACHE_DIR = numba.config.CACHE_DIR or _cache_folder()


def _fingerprint() -> str:
    """Of the source of all kernels, as a name. Numba compiles a kernel anew when its file has changed; with this name
    in its signature, also when another has whose functions it calls.
    """
    files = sorted(Path(__file__).parents[1].rglob("*_numba.py"))
    return f"of_{zlib.crc32(b''.join(file.read_bytes() for file in (Path(__file__), *files))):08x}"


_SOURCE = _fingerprint()


def _open_runtime() -> Any:
    """torch's CPU library, through which symbols of its OpenMP runtime are found, whatever that is called."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    for name in ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier"):
        llvmlite.binding.add_symbol(name, ctypes.cast(library[name], ctypes.c_void_p).value)
    run_team = library["GOMP_parallel"]
    run_team.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
    run_team.restype = None
    return run_team


try:
    _run_team = _open_runtime()
except (OSError, AttributeError) as error:
    raise ImportError(f"torch's OpenMP runtime was not found: {error}") from error

_thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())
_team_size = types.ExternalFunction("omp_get_num_threads", types.int32())
wait_for_team = types.ExternalFunction("GOMP_barrier", types.void())
"""In a kernel: returns when all threads of the team are here. What they wrote before can be read then."""


class Kernel:
    """Compiled code. Calling it packs the arguments, in the order of the fields, and returns when all threads have."""

    def __init__(self, code: Any, layout: str) -> None:
        self._pack = struct.Struct(layout).pack
        self._address: int = code.address
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(code.address)
        self._code = code  # owns the memory

    def __call__(self, *arguments: float, threads: int) -> None:
        packed = self._pack(*arguments)
        if threads == 1:
            self._alone(packed)
        else:
            _run_team(self._address, packed, threads, 0)


def kernel(integers: str, floats: str = "") -> Callable[[Callable[[Any], None]], Kernel]:
    """Compile a function of a pointer to one record with these fields, addresses of tensors among the integers."""
    names, layout = integers.split() + floats.split(), "q" * len(integers.split()) + "d" * len(floats.split())
    types_ = [np.int64 if kind == "q" else np.float64 for kind in layout]
    record = from_dtype(np.dtype([*zip(names, types_, strict=True), (_SOURCE, np.int64)]))
    signature = types.void(types.CPointer(record))

    def compile_kernel(body: Callable[[Any], None]) -> Kernel:
        try:
            code = cfunc(signature, cache=True, **_ARITHMETIC)(body)
        except RuntimeError as error:  # no folder to keep it in
            log.warning("compiling %s at every start: %s", body.__name__, error)
            code = cfunc(signature, **_ARITHMETIC)(body)
        return Kernel(code, layout)

    return compile_kernel


def kernel_function(body: Callable[..., Any]) -> Any:
    """Compile a function that kernels call."""
    return njit(body, **_ARITHMETIC)


def threads_for(elements: int) -> int:
    """How many threads to use for this many elements."""
    return max(1, min(torch.get_num_threads(), elements // _THREAD_ELEMENTS))


def _pointer_to(item: types.Type) -> Any:
    """A function for kernels that turns an integer into a pointer."""

    @intrinsic
    def pointer(_context, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(item)(address), generate

    return pointer


_float_pointer, _long_pointer = _pointer_to(types.float32), _pointer_to(types.int64)


@kernel_function
def fields(arguments):
    """In a kernel: its record."""
    return carray(arguments, 1)[0]


@kernel_function
def floats(address, shape):
    """In a kernel: the contiguous float32 tensor at an address."""
    return carray(_float_pointer(address), shape)


@kernel_function
def longs(address, shape):
    """In a kernel: the contiguous int64 tensor at an address."""
    return carray(_long_pointer(address), shape)


@kernel_function
def slice_of(count, part, parts):
    """In a kernel: the one of `parts` even parts of `count` things that has this number, as [first, last)."""
    return count * part // parts, count * (part + 1) // parts


@kernel_function
def share(count):
    """In a kernel: the part of `count` things that is this thread's, as [first, last)."""
    return slice_of(count, _thread_number(), _team_size())


@njit(fastmath={"contract"}, error_model="numpy")  # the order of the terms of r matters
def exp(x):
    """In a kernel: e to the power of a float32, to one unit in the last place. Unlike math.exp it runs in vector lanes.

    x = n ln 2 + r; the polynomial (Cephes) gives e^r, and n becomes the exponent.
    """
    x = min(max(x, np.float32(-87.3)), np.float32(88.8))
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    power = np.float32(1.9875691500e-4)
    power = power * r + np.float32(1.3981999507e-3)
    power = power * r + np.float32(8.3334519073e-3)
    power = power * r + np.float32(4.1665795894e-2)
    power = power * r + np.float32(1.6666665459e-1)
    power = power * r + np.float32(5.0000001201e-1)
    power = power * r * r + r + np.float32(1)
    return power * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
