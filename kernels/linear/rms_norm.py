"""Root-mean-square norm of rows, alone or of a residual sum.

    rms_norm(x)          =  weight * round(x / sqrt(mean(x^2) + eps))
    add_rms_norm(x, y)   =  s, rms_norm(s)      with  s = x + y

Shapes: x, y, s [rows, size], contiguous; weight [size]. As in transformers, the float32 quotient is rounded to the
model's dtype before the weight is applied, and s is rounded before its norm is computed. With a float32 weight and x of
16 bits, as in Gemma models, the quotient is not rounded: the product is computed in float32 and rounded once.

Lower bound: rms_norm moves 2, add_rms_norm 4 rows; at decode sizes both take one launch latency.
"""

import torch

from ..backends.dispatch import Impl, launcher, use_numba, use_triton


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype == torch.float32:  # no intermediate rounding: torch's own op, one call instead of six
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight.dtype == torch.float32:
        return (weight * wide).to(x.dtype)
    return weight * wide.to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + y
    return total, rms_norm_reference(total, weight, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, impl: Impl = "auto") -> torch.Tensor:
    """Norm of each row; see the module docstring."""
    if use_numba(impl, x, weight):
        launch = launcher("numba.rms_norm", "launch_rms_norm")
    elif use_triton(impl, x.device):
        launch = launcher("linear.rms_norm_triton", "launch_rms_norm")
    else:
        return rms_norm_reference(x, weight, eps)
    _check(x, weight)
    out = torch.empty_like(x)
    launch(x, None, weight, None, out, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float, *, impl: Impl = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of two tensors and the norm of its rows, in one pass; see the module docstring."""
    if use_numba(impl, x, y, weight):
        launch = launcher("numba.rms_norm", "launch_rms_norm")
    elif use_triton(impl, x.device):
        launch = launcher("linear.rms_norm_triton", "launch_rms_norm")
    else:
        return add_rms_norm_reference(x, y, weight, eps)
    _check(x, weight)
    if y.shape != x.shape or y.dtype != x.dtype or not y.is_contiguous():
        raise ValueError(f"cannot add {y.dtype} {list(y.shape)} to {x.dtype} {list(x.shape)}: both must be contiguous")
    total, out = torch.empty_like(x), torch.empty_like(x)
    launch(x, y, weight, total, out, eps)
    return total, out


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    fits = weight.shape == x.shape[1:] and weight.dtype in (x.dtype, torch.float32)
    if x.ndim != 2 or not x.is_contiguous() or not fits:
        raise ValueError(
            f"x {x.dtype} {list(x.shape)} must be contiguous rows of the size and dtype of "
            f"weight {weight.dtype} {list(weight.shape)}"
        )
