"""Launcher of csrc/linear/int4_linear.cu, for x of few rows in 16 bits."""

import torch

from ..backends.few_rows_cuda import OUTPUT_TILE, Format, Tiles, launch_few_rows
from .group_format import GroupScaled


def launch_int4_linear_cuda(
    x: torch.Tensor,
    weight: GroupScaled,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    gated: bool,
    tiles: Tiles | None = None,
) -> None:
    """Fill `out` [rows, outputs]; for tensors that `suits_cuda` accepts."""
    assert weight.zeros is not None, "MXFP4 has only kernels of experts"
    launch_few_rows(
        cuda_format(weight.group),
        x,
        (weight.packed.data_ptr(), weight.scales.data_ptr(), weight.zeros.data_ptr()),
        bias,
        out,
        weight.packed.shape[1],
        weight.scales.stride(0),
        steps=weight.packed.shape[1] // weight.group,
        gated=gated,
        tiles=tiles,
    )


def cuda_format(group: int) -> Format:
    """The kernel for groups of so many columns."""
    scale_bytes = 8 * OUTPUT_TILE  # scales and zeros of two groups
    constants = (("GROUP", group),)
    return Format("int4_linear", OUTPUT_TILE * group + scale_bytes, warps=(16, 8, 4), constants=constants)


def suits_cuda(x: torch.Tensor, weight: GroupScaled) -> bool:
    """Whether the kernel can multiply them. It copies 16 bytes at a time: 8 scales, for example."""
    if not x.is_cuda or x.itemsize != 2 or len(weight) % 16 or weight.zeros is None:
        return False
    tensors = (x, weight.packed, weight.scales, weight.zeros)
    return weight.scales.stride(0) % 8 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
