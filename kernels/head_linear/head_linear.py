"""One matrix product per head: out[t, h] = x[t, h] @ weight[h].

Shapes: x [T, H, K] and out [T, H, N] with contiguous last dimensions; weight [H, K, N], of which the second or the last
is contiguous. Sums are float32. On a GPU, a Triton kernel computes few tokens; it loads the weights while the previous
kernel still runs.

Lower bound: the weights read once.
"""

import torch

from ..backends.dispatch import Impl, use_triton
from ..backends.half_products import computes_in

MOST_TOKENS = 64
"""The most tokens for the Triton kernel."""
_MOST_COLUMN_BYTES = 1024
"""The most bytes of a head of x for the Triton kernel: a program loads all columns at once."""


def head_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, impl: Impl = "auto") -> None:
    """Fill `out`; see the module docstring."""
    tokens, heads, columns = x.shape
    if weight.shape[:2] != (heads, columns) or out.shape != (tokens, heads, weight.shape[2]):
        raise ValueError(f"x {list(x.shape)}, weight {list(weight.shape)} and out {list(out.shape)} do not match")
    if not x.dtype == weight.dtype == out.dtype:
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype}, out {out.dtype}")
    few = tokens <= MOST_TOKENS and columns * x.itemsize <= _MOST_COLUMN_BYTES
    if use_triton(impl, x.device) and (few or impl == "triton"):
        if x.stride(2) != 1 or out.stride(2) != 1:
            raise ValueError(f"x has strides {x.stride()}, out {out.stride()}: heads must be contiguous")
        from .head_linear_triton import launch_head_linear

        launch_head_linear(x, weight, out)
        return
    wide = x.dtype if x.is_cuda else computes_in(x.dtype)
    if wide is x.dtype:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    else:
        out.copy_(torch.bmm(x.transpose(0, 1).to(wide), weight.to(wide)).transpose(0, 1))
