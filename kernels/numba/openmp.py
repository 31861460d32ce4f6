"""Compiles kernels for CPU tensors with Numba and runs them on torch's threads.

A kernel is a function of one record of arguments, which every thread of an OpenMP team calls; `share` returns the
thread's part of the work. The team belongs to the OpenMP runtime that torch is linked with: threads of a second pool
would compete for cores with torch's threads, which spin for a while after each operation.

Compiled code is cached in the user's cache folder, or in NUMBA_CACHE_DIR; Numba's default, beside the source, would
remain after an uninstall. A kernel is compiled on its first call, or by `compile_kernels`. All of them take half a
minute of one core: processes that start at the same time, such as the servers of a pair, divide them.
Importing this module raises ImportError if Numba or torch's OpenMP runtime is missing.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import ctypes
import fcntl
import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from numba import carray, cfunc, from_dtype, njit, types
from numba.extending import intrinsic

from ...common.progress import ProgressLog

log = logging.getLogger(__name__)

_THREAD_ELEMENTS = 8192
"""Waking a thread takes as long as processing this many elements."""

_ARITHMETIC = {"fastmath": {"contract", "nsz", "reassoc"}, "error_model": "numpy"}
"""Sums may be reordered and products fused; nothing is approximated, infinities and NaN keep their meaning, and a
division by zero gives one of them."""


def _cache_folder() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return str(Path(base).expanduser() / "pdserve" / "kernels")


numba.config.CACHE_DIR = numba.config.CACHE_DIR or _cache_folder()


def _fingerprint() -> str:
    """A name made from a checksum of all kernel sources. Numba recompiles a kernel when its own file changes; with this
    name in its signature, also when a file with functions that it calls changes.
    """
    folder = Path(__file__).parent
    files = [*sorted(folder.glob("*.py")), *sorted((folder.parent / "gguf").glob("*.py"))]
    return f"of_{zlib.crc32(b''.join(file.read_bytes() for file in files)):08x}"


_SOURCE = _fingerprint()


def _open_runtime() -> Any:
    """Find symbols of torch's OpenMP runtime, whatever its name, through torch's CPU library."""
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

thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())
"""In a kernel: the number of this thread in its team, from 0 on."""
_team_size = types.ExternalFunction("omp_get_num_threads", types.int32())
wait_for_team = types.ExternalFunction("GOMP_barrier", types.void())
"""In a kernel: a barrier. Afterwards, what all threads wrote before it can be read."""


class Kernel:
    """A compiled function. A call packs the arguments in field order and returns when all threads have finished."""

    def __init__(self, body: Callable[[Any], None], signature: Any, layout: str) -> None:
        self._body = body
        self._signature = signature
        self._pack = struct.Struct(layout).pack
        self._code: Any = None  # owns the memory
        self._address = 0
        self._alone: Any = None

    def __call__(self, *arguments: float, threads: int) -> None:
        if self._code is None:
            self.compile()
        packed = self._pack(*arguments)
        if threads == 1:
            self._alone(packed)
        else:
            _run_team(self._address, packed, threads, 0)

    def compile(self, *, wait: bool = True) -> bool:
        """Compile it, or load it from the cache. Returns False if another process is compiling it, unless `wait`: then
        what that process has cached is loaded.
        """
        with _compiling:
            if self._code is not None:
                return True
            with _claim(f"{self._body.__module__}.{self._body.__name__}", wait=wait) as claimed:
                if not claimed:
                    return False
                code = self._compiled()
            self._address = code.address
            self._alone = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._address)
            self._code = code  # last: other threads call the kernel from now on
        return True

    def _compiled(self) -> Any:
        try:
            return cfunc(self._signature, cache=True, **_ARITHMETIC)(self._body)
        except RuntimeError as error:  # no writable cache folder
            log.warning(
                "CPU kernels: %s is compiled again at every start, because it cannot be cached: %s",
                self._body.__name__,
                error,
            )
            return cfunc(self._signature, **_ARITHMETIC)(self._body)


_compiling = threading.Lock()
"""Numba compiles in one thread at a time anyway."""


@contextmanager
def _claim(name: str, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of a kernel, which processes with the same cache share; yields whether this process has it. Where
    files cannot be locked, every process has it.
    """
    try:
        folder = Path(numba.config.CACHE_DIR) / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / name).open("a")
    except OSError:
        yield True
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True


_declared: list[Kernel] = []


def compile_kernels() -> None:
    """Compile the kernels of all imported modules, or load them from the cache, the last one first: it takes longest.
    Those that other processes are compiling are left for the end, when they are in the cache.
    """
    progress = ProgressLog(log, "CPU kernels: %d of %d are compiled", len(_declared))
    busy = []
    for each in reversed(_declared):
        if each.compile(wait=False):
            progress.add(1)
        else:
            busy.append(each)
    for each in busy:
        each.compile()
        progress.add(1)


def kernel(integers: str, floats: str = "") -> Callable[[Callable[[Any], None]], Kernel]:
    """Declare a kernel: a function of a pointer to one record with these fields; addresses of tensors are integers."""
    names, layout = integers.split() + floats.split(), "q" * len(integers.split()) + "d" * len(floats.split())
    types_ = [np.int64 if kind == "q" else np.float64 for kind in layout]
    record = from_dtype(np.dtype([*zip(names, types_, strict=True), (_SOURCE, np.int64)]))
    signature = types.void(types.CPointer(record))

    def declare(body: Callable[[Any], None]) -> Kernel:
        declared = Kernel(body, signature, layout)
        _declared.append(declared)
        return declared

    return declare


def kernel_function(body: Callable[..., Any]) -> Any:
    """Compile a function that kernels call."""
    return njit(body, **_ARITHMETIC)


def threads_for(elements: int) -> int:
    """Threads to use for this many elements."""
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
    """In a kernel: its record of arguments."""
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
    """In a kernel: part number `part` of `count` items split into `parts` even parts, as [first, last)."""
    return count * part // parts, count * (part + 1) // parts


@kernel_function
def share(count):
    """In a kernel: this thread's part of `count` items, as [first, last)."""
    return slice_of(count, thread_number(), _team_size())


@njit(fastmath={"contract"}, error_model="numpy")  # the order of the terms of r matters
def exp(x):
    """In a kernel: e to the power of a float32, to one unit in the last place. Unlike math.exp it is vectorised.

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
