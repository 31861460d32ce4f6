"""Which implementation of an operation runs: Triton on CUDA tensors; Numba on float32 tensors of the CPU, where the
operation has such kernels and Numba is installed; plain torch everywhere else.
"""

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Literal

import torch

Impl = Literal["auto", "reference", "triton", "numba"]

log = logging.getLogger(__name__)

_KERNELS = __package__.rpartition(".")[0]
_NUMBA_KERNELS = (
    "attention.paged_decode_numba",
    "attention.rope_kv_write_numba",
    "linear.linear_numba",
    "linear.rms_norm_numba",
    "linear.swiglu_numba",
)


def use_triton(impl: Impl, device: torch.device) -> bool:
    """`auto` is Triton on CUDA and the reference elsewhere; raises ValueError for a name that is none of ours.

    "triton" on another device is taken at its word: it works where Triton interprets (TRITON_INTERPRET=1).
    """
    if impl == "auto":
        return device.type == "cuda"
    if impl not in ("reference", "triton"):
        raise ValueError(f"impl must be auto, reference or triton, or numba where an operation has it; got {impl!r}")
    return impl == "triton"


def use_numba(impl: Impl, *tensors: torch.Tensor, pages: tuple[torch.Tensor, ...] = ()) -> bool:
    """`auto` is Numba for float32 on CPU; `tensors` are contiguous, and `pages` have the same strides, rows contiguous.

    Raises ValueError where "numba" was asked for and they are not.
    """
    if impl not in ("auto", "numba"):
        return False
    fits = True
    for tensor in tensors:  # a plain loop: a hundred calls a step, and `all(...)` takes twice as long
        fits = fits and tensor.is_cpu and tensor.dtype is torch.float32 and tensor.is_contiguous()
    for plane in pages:
        strides = plane.stride()
        fits = fits and plane.dtype is torch.float32 and strides[-1] == 1 and strides == pages[0].stride()
    fits = fits and numba_works()
    if impl == "numba" and not fits:
        found = ", ".join(f"{each.dtype} {list(each.shape)} of {each.device}" for each in (*tensors, *pages))
        raise ValueError(f"Numba, where installed, takes float32 of the CPU with contiguous rows, got {found}")
    return fits


@functools.cache
def launcher(module: str, name: str) -> Callable[..., None]:
    """A function of a module of compiled kernels, such as `linear.swiglu_triton`, which is imported on first use."""
    found: Callable[..., None] = getattr(importlib.import_module(f"{_KERNELS}.{module}"), name)
    return found


@functools.cache
def numba_works() -> bool:
    """Whether kernels can be compiled for this CPU. Asked once; the answer holds for the life of the process."""
    try:
        importlib.import_module(".openmp", __package__)
    except ImportError as error:
        log.info("CPU kernels: plain torch (%s)", error)
        return False
    return True


def prepare_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Compile, or load from where they are kept, the kernels that a first request would otherwise wait for."""
    if device.type == "cpu" and dtype == torch.float32 and numba_works():
        for name in _NUMBA_KERNELS:
            importlib.import_module(f"{_KERNELS}.{name}")
        log.info("CPU kernels: compiled by Numba, on %d threads", torch.get_num_threads())
