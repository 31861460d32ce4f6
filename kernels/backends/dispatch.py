"""Selects the implementation of an operation: Triton on CUDA tensors, Numba (kernels/numba/) on float32 CPU tensors if
the operation has such a kernel, plain torch everywhere else.
"""

import functools
import importlib
import logging
import platform
from collections.abc import Callable
from typing import Literal

import torch

from ...common.errors import StartupError
from ...configs.setting_types import CpuKernelsSetting

Impl = Literal["auto", "reference", "triton", "numba"]

log = logging.getLogger(__name__)

_KERNELS = __package__.rpartition(".")[0]
_NUMBA_MODULES = ("linear", "paged_decode", "rms_norm", "rope_kv_write", "swiglu")
_GGUF_MODULES = ("gguf_linear",)
_INTERLEAVED_MODULES = ("interleaved_linear", "layer_stack")
NEON = platform.machine() == "aarch64"
"""Whether kernels for interleaved GGUF blocks are those of NEON; otherwise they are those of AVX2 or AVX-512."""
_numba_allowed = True


def use_triton(impl: Impl, device: torch.device) -> bool:
    """`auto` is Triton on CUDA and the reference elsewhere. Raises ValueError for an unknown name.

    "triton" is accepted on any device: on the CPU it needs Triton's interpreter (TRITON_INTERPRET=1).
    """
    if impl == "auto":
        return device.type == "cuda"
    if impl not in ("reference", "triton"):
        raise ValueError(f"impl must be auto, reference or triton, or numba where an operation has it; got {impl!r}")
    return impl == "triton"


def use_numba(impl: Impl, *tensors: torch.Tensor, pages: tuple[torch.Tensor, ...] = ()) -> bool:
    """`auto` is Numba for float32 on the CPU, unless `cpu_kernels` is torch: `tensors` must be contiguous, and `pages`
    must have equal strides and contiguous rows. Raises ValueError if `impl` is "numba" and they do not.
    """
    if impl not in ("auto", "numba") or (impl == "auto" and not _numba_allowed):
        return False
    fits = True
    for tensor in tensors:  # a plain loop: a step makes a hundred calls, and `all(...)` takes twice as long
        fits = fits and tensor.is_cpu and tensor.dtype is torch.float32 and tensor.is_contiguous()
    for plane in pages:
        strides = plane.stride()
        fits = fits and plane.dtype is torch.float32 and strides[-1] == 1 and strides == pages[0].stride()
    fits = fits and _numba_problem() is None
    if impl == "numba" and not fits:
        found = ", ".join(f"{each.dtype} {list(each.shape)} of {each.device}" for each in (*tensors, *pages))
        raise ValueError(f"Numba, where installed, takes float32 of the CPU with contiguous rows, got {found}")
    return fits


@functools.cache
def launcher(module: str, name: str) -> Callable[..., None]:
    """A function of a module of compiled kernels, such as `linear.swiglu_triton`, which is imported on first use."""
    found: Callable[..., None] = getattr(importlib.import_module(f"{_KERNELS}.{module}"), name)
    return found


def numba_computes(cpu_kernels: CpuKernelsSetting | None = None) -> bool:
    """Whether `auto` uses the Numba kernels in this process, or would with this setting."""
    allowed = _numba_allowed if cpu_kernels is None else cpu_kernels != "torch"
    return allowed and _numba_problem() is None


def has_interleaved_kernels() -> bool:
    """Whether this processor has the instructions of the kernels for interleaved GGUF blocks: AVX2, AVX-512 with the
    parts for bytes and words, or NEON with dot products.
    """
    if NEON:
        return bool(torch.cpu.get_capabilities()["dot"])
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def prepare_kernels(
    device: torch.device, dtype: torch.dtype, cpu_kernels: CpuKernelsSetting = "auto", *, blocks: bool = False
) -> None:
    """Apply the setting `cpu_kernels` to this process, and compile or load from the cache the kernels that the first
    request would otherwise wait for, with `blocks` those for weights in GGUF blocks too. Raises StartupError if Numba
    is required and missing.
    """
    global _numba_allowed  # dispatch has no object of its own that ranks could configure
    _numba_allowed = cpu_kernels != "torch"
    if device.type != "cpu" or dtype != torch.float32:
        return
    problem = _numba_problem() if _numba_allowed else "cpu_kernels = torch"
    if problem is not None:
        if cpu_kernels == "numba":
            raise StartupError(f"cpu_kernels = numba: {problem}; install pdserve with the extra cpu, or use auto")
        log.info("CPU kernels: plain torch (%s)", problem)
        return
    gguf_modules = _GGUF_MODULES + (_INTERLEAVED_MODULES if has_interleaved_kernels() else ()) if blocks else ()
    for name in _NUMBA_MODULES + gguf_modules:
        importlib.import_module(f"{_KERNELS}.numba.{name}")
    launcher("numba.openmp", "compile_kernels")()
    log.info("CPU kernels: compiled by Numba, on %d threads", torch.get_num_threads())


@functools.cache
def _numba_problem() -> str | None:
    """Why Numba kernels cannot be compiled in this process; None if they can."""
    try:
        importlib.import_module(f"{_KERNELS}.numba.openmp")
    except ImportError as error:
        return str(error)
    return None
