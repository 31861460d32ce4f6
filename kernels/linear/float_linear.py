"""Linear layers with float32 weights over 16-bit rows, without a float32 copy of the rows.

    float_linear(x)  =  x.float() @ weight.T

Shapes: x [rows, in]; weight [out, in] float32; result [rows, out] float32, sums in float32. For layers whose results
rank tokens or experts, such as a router. cuBLAS would need several launches (a conversion, a split product, its sum)
and multiplies float32 without tensor cores. The Triton kernel is one launch, and uses tensor cores for bfloat16 rows.
On Hopper a CUDA kernel computes few rows in bfloat16 if the weights fit in the shared memory of all multiprocessors.
"""

import torch
from torch.nn.functional import linear as torch_linear

from ..backends.dispatch import Impl, launcher, use_triton
from ..backends.float_at_once_cuda import launch_float_at_once, suits_float_at_once
from .linear import FEW_ROWS, linear


def float_linear_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch_linear(x.float(), weight)


def float_linear(x: torch.Tensor, weight: torch.Tensor, *, impl: Impl = "auto") -> torch.Tensor:
    """A linear layer in float32; see the module docstring. On CUDA, `auto` selects Triton, but `linear` for many rows
    that are not in bfloat16.
    """
    if weight.dtype != torch.float32 or x.ndim != 2 or x.shape[1:] != weight.shape[1:]:
        raise ValueError(
            f"x {list(x.shape)} must be rows as long as those of weight {list(weight.shape)}, and the weight float32, "
            f"got {weight.dtype}"
        )
    if impl == "reference":
        return float_linear_reference(x, weight)
    few = len(x) <= FEW_ROWS or x.dtype == torch.bfloat16
    fits = few and x.is_contiguous() and weight.is_contiguous()
    if not use_triton(impl, x.device) or (impl == "auto" and not fits):
        return linear(x.float(), weight)
    if not fits:
        raise ValueError(
            f"x {list(x.shape)} and the weight must be contiguous, and x in {x.dtype} at most {FEW_ROWS} rows"
        )
    out = x.new_empty(len(x), len(weight), dtype=torch.float32)
    if impl == "auto" and suits_float_at_once(x, weight):
        launch_float_at_once(x, weight, out)
    else:
        launcher("linear.float_linear_triton", "launch_float_linear")(x, weight, out)
    return out
