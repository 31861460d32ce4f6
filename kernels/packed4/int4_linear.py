"""Linear layers with 4-bit weights (group_format.py), computed in one of two ways:

    cuda        x @ weight.T + bias          unpacks values in registers, scales the sums of a group; few 16-bit rows
    expand      x @ round(weight).T + bias   expands the weights to the dtype of x, some rows at a time, for cuBLAS

Shapes: x [rows, in]; weight [out, in]; bias [out] or None; result [rows, out] in the dtype of x, rounded once.
With `gated`, swiglu is applied: `weight` has the rows of gate, then those of up, and the result is [rows, out / 2].

Lower bounds: with few rows, the packed weights read once. With groups of 128 columns a weight has 4.25 bits, so the
layers of Qwen3-8B have 3.69 GB, which take 0.87 ms on an H200 (4.25 TB/s); in bfloat16 they take 3.27 ms. With many
rows, 2 * rows * out * in operations at the bfloat16 rate; `expand` adds about 4.5 bytes of traffic per weight.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch.nn.functional import linear as torch_linear

from ...common.arithmetic import ceil_div, round_up
from ..backends.dispatch import Impl, launcher, use_triton
from ..backends.few_rows_cuda import Tiles
from .group_format import GroupScaled
from .int4_linear_cuda import launch_int4_linear_cuda, suits_cuda

Method = Literal["cuda", "expand"]

CUDA_ROWS = 96
"""Up to this many rows, the CUDA kernel is used where it can run. With 96 rows, the linear layers of a decoder layer of
Qwen3-8B take 244 us with it and 261 us with expanded weights; with 112 rows, 297 and 268 us (H200).
"""
SCRATCH_BYTES = 64 << 20
"""Expanded weights in memory at a time, about as much as the L2 cache holds."""
OUTPUT_STEP = 128
"""The number of outputs that are computed at a time is a multiple of this. With ranges of 2,730 and 1,366 outputs,
whose rows are not aligned, `down` of Qwen3-8B took 3.4 ms for 8,192 rows; cuBLAS takes 1.15 ms for the whole matrix
(H200).
"""


def choose_method(x: torch.Tensor, weight: GroupScaled) -> Method:
    """The method for these tensors. Only this function chooses a method."""
    return "cuda" if len(x) <= CUDA_ROWS and suits_cuda(x, weight) else "expand"


def int4_linear_reference(x: torch.Tensor, weight: GroupScaled, bias: torch.Tensor | None = None) -> torch.Tensor:
    """In float32, rounded once."""
    return torch_linear(x.float(), weight.expanded(), None if bias is None else bias.float()).to(x.dtype)


def int4_linear(
    x: torch.Tensor,
    weight: GroupScaled,
    bias: torch.Tensor | None = None,
    *,
    method: Method | None = None,
    tiles: Tiles | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
    impl: Impl = "auto",
) -> torch.Tensor:
    """A linear layer; see the module docstring."""
    _check(x, weight, bias)
    if not use_triton(impl, x.device):
        return int4_linear_reference(x, weight, bias)
    out = x.new_empty(len(x), len(weight))
    method = method or choose_method(x, weight)
    if method == "cuda":
        launch_int4_linear_cuda(x, weight, bias, out, gated=False, tiles=tiles)
        return out
    for part in output_parts(len(weight), weight.columns * x.itemsize, scratch_bytes):
        expanded = expanded_rows(weight[part], x.dtype).t()
        if bias is None:
            torch.mm(x, expanded, out=out[:, part])
        else:
            torch.addmm(bias[part], x, expanded, out=out[:, part])
    return out


def int4_gated_linear(
    x: torch.Tensor,
    weight: GroupScaled,
    bias: torch.Tensor | None = None,
    *,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """swiglu(int4_linear(x)) by the CUDA kernel."""
    _check(x, weight, bias)
    out = x.new_empty(len(x), len(weight) // 2)
    launch_int4_linear_cuda(x, weight, bias, out, gated=True, tiles=tiles)
    return out


def output_parts(outputs: int, output_bytes: int, scratch_bytes: int) -> Iterator[slice]:
    """Ranges of about equal size of `outputs`; the expanded weights of one output take `output_bytes`."""
    most = max(OUTPUT_STEP, scratch_bytes // output_bytes // OUTPUT_STEP * OUTPUT_STEP)
    step = round_up(ceil_div(outputs, ceil_div(outputs, most)), OUTPUT_STEP)
    for first in range(0, outputs, step):
        yield slice(first, min(first + step, outputs))


def expanded_rows(weight: GroupScaled, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in `dtype`, by Triton."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.packed.device)
    launcher("packed4.expand_triton", "launch_expand")(weight, out)
    return out


def _check(x: torch.Tensor, weight: GroupScaled, bias: torch.Tensor | None) -> None:
    if x.ndim != 2 or x.shape[1] != weight.columns or not x.is_contiguous():
        raise ValueError(f"x {list(x.shape)} must be contiguous rows as long as those of weight {list(weight.shape)}")
    if weight.packed.ndim != 2 or weight.zeros is None:
        raise ValueError(f"weight {list(weight.shape)} must be one matrix of integers; experts.py computes others")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)} must have an element for each row of weight {list(weight.shape)}")
