"""Linear layers. Few rows, where reading the weights takes all the time, have their own kernels.

    linear(x)        =  x @ weight.T + bias
    gated_linear(x)  =  swiglu(linear(x))          the rows of `weight` are those of gate, then those of up; with `gelu`
                                                   as in swiglu.py

Shapes: x [rows, in]; weight [out, in]; bias [out] or None; result [rows, out], of gated_linear [rows, out / 2]. Sums
are float32 and rounded once, as in cuBLAS; swiglu reads the rounded values.

Lower bound: the weights read once. With few rows, cuBLAS takes 1.1 times as long for the large matrices of a layer and
1.7 times for the small ones (H200). Most of the difference is between the end of one kernel and the first loads of the
next. These kernels start, and prefetch their first weights, while the previous kernel still runs.

On CUDA, csrc/linear/plain_linear.cu computes very few rows and Triton a few more. On Hopper, csrc/linear/gemv.cu
computes up to 4 short rows.

Weights in fp8 (fp8_linear.py), in 4 bits (int4_linear.py) and in GGUF blocks (gguf_linear.py) have kernels of their
own.
"""

from collections.abc import Callable
from functools import partial

import torch

from ..backends.dispatch import Impl, launcher, use_numba, use_triton
from ..backends.few_rows_cuda import OUTPUT_TILE, ROW_TILE, Format, can_run, launch_few_rows
from ..backends.gemv_cuda import launch_gemv, suits_gemv
from ..backends.half_products import linear_reference
from .swiglu import swiglu, swiglu_reference

FEW_ROWS = 32
"""Up to this many rows, the kernels of this project are faster than cuBLAS, alone and in a CUDA graph (H200)."""

FEW_CPU_ROWS = 16
"""The same on a CPU: with AVX-512 on two cores, half the time of torch for 8 rows, three quarters for 16."""

CUDA_COLUMNS = 64
"""Columns of a step of csrc/linear/plain_linear.cu."""
CUDA_FORMAT = Format("plain_linear", OUTPUT_TILE * CUDA_COLUMNS * 2)
_CUDA_BYTES = 256 << 20
"""plain_linear.cu multiplies weights up to this size. Triton reads larger ones, such as lm_head, at the copy rate."""


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, impl: Impl = "auto"
) -> torch.Tensor:
    """A linear layer; see the module docstring. For few rows, `auto` selects a kernel of this project for 16 bits on
    CUDA, and Numba for float32 on the CPU. Otherwise it selects torch.
    """
    launch = _launcher(x, weight, bias, impl)
    if launch is None:
        return linear_reference(x, weight, bias)
    out = x.new_empty(x.shape[0], weight.shape[0])  # `len` of a tensor takes microseconds
    launch(x, weight, bias, out, gated=False)
    return out


def gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gelu: bool = False,
    impl: Impl = "auto",
) -> torch.Tensor:
    """The first half of a Llama-style MLP; see the module docstring. `auto` is as in `linear`."""
    if (launch := _launcher(x, weight, bias, impl, gelu=gelu)) is not None:
        out = x.new_empty(x.shape[0], weight.shape[0] // 2)
        launch(x, weight, bias, out, gated=True)
        return out
    gate_up = linear(x, weight, bias, impl=impl)
    return swiglu_reference(gate_up, gelu=gelu) if impl == "reference" else swiglu(gate_up, gelu=gelu)


def _launcher(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, impl: Impl, *, gelu: bool = False
) -> Callable[..., None] | None:
    """The kernel for few rows; None if torch computes them."""
    if _numba_fits(x, weight, bias, impl):
        launch = launcher("numba.linear", "launch_linear")
    elif not _triton_fits(x, weight, impl):
        return None
    elif not gelu and _cuda_fits(x, weight):
        return _launch_cuda
    else:
        launch = launcher("linear.linear_triton", "launch_linear")
    return partial(launch, gelu=True) if gelu else launch


def _numba_fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, impl: Impl) -> bool:
    few = x.ndim == 2 and 1 <= x.shape[0] <= FEW_CPU_ROWS and weight.shape[1:] == x.shape[1:]
    if bias is not None:
        few = few and bias.shape == weight.shape[:1]
    if impl == "numba" and not few:
        raise ValueError(f"x {list(x.shape)} must be 1 to {FEW_CPU_ROWS} rows as long as those of {list(weight.shape)}")
    return few and use_numba(impl, x, weight, *(() if bias is None else (bias,)))


def _cuda_fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether csrc/linear/plain_linear.cu takes less time than Triton."""
    if not x.is_cuda or x.dtype.itemsize != 2 or x.shape[0] > ROW_TILE or not can_run(x.device):
        return False
    aligned = weight.data_ptr() % 16 == 0 and x.data_ptr() % 16 == 0
    return aligned and x.shape[1] % CUDA_COLUMNS == 0 and weight.nbytes <= _CUDA_BYTES


def _launch_cuda(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, gated: bool
) -> None:
    if suits_gemv(x, weight):
        launch_gemv(x, weight, bias, out, gated=gated)
        return
    steps = x.shape[1] // CUDA_COLUMNS
    launch_few_rows(CUDA_FORMAT, x, (weight.data_ptr(),), bias, out, steps=steps, gated=gated)


def _triton_fits(x: torch.Tensor, weight: torch.Tensor, impl: Impl) -> bool:
    if not use_triton(impl, x.device):
        return False
    fits = x.ndim == 2 and x.shape[0] <= FEW_ROWS and x.is_contiguous() and weight.is_contiguous()
    if impl == "triton" and not fits:
        raise ValueError(
            f"x {list(x.shape)} must be at most {FEW_ROWS} rows, and contiguous as weight {list(weight.shape)}"
        )
    return fits and (impl == "triton" or x.dtype.itemsize == 2)
