"""Launcher of csrc/packed4/int4_linear.cu, for x of few rows in 16 bits.

If x is small, each thread block converts it to 8-bit integers. Products of integers take fewer instructions, and
instructions limit the kernel more than memory does.
"""

import torch

from ..backends.few_rows_cuda import OUTPUT_TILE, Format, Tiles, launch_few_rows
from .group_format import GroupScaled

INTEGER_ROWS = 4
"""Rows of x in one mma instruction of integers: each of them takes two of its 8 rows."""
MOST_INTEGER_BYTES = 32 << 10
"""Bytes of x as integers in shared memory. With more, the rings would hold too few weights in flight."""


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
    steps = weight.packed.shape[1] // weight.group
    launch_few_rows(
        cuda_format(weight.group, integer_bytes(weight.group, steps, len(x)) if len(x) <= INTEGER_ROWS else None),
        x,
        (weight.packed.data_ptr(), weight.scales.data_ptr(), weight.zeros.data_ptr()),
        bias,
        out,
        weight.packed.shape[1],
        weight.scales.stride(0),
        steps=steps,
        gated=gated,
        tiles=tiles,
    )


def integer_bytes(group: int, steps: int, rows: int) -> int | None:
    """Shared memory for `rows` rows of x as integers, with `steps` pairs of groups each (csrc/packed4/byte_format.cuh);
    None if they are too long.
    """
    rounded = 1 << (rows - 1).bit_length()  # limits the number of shared memory sizes, and so of compiled kernels
    found = rounded * (2 * (2 * steps * group + min(group, 64)) + 2 * steps * 8)
    return found if found <= MOST_INTEGER_BYTES else None


def cuda_format(group: int, x_bytes: int | None) -> Format:
    """The kernel for groups of `group` columns, and for x as integers that take `x_bytes`, or not converted if None."""
    step_bytes = OUTPUT_TILE * group + 8 * OUTPUT_TILE  # values; scales and zeros of two groups
    constants = (("GROUP", group),)
    if x_bytes is None:
        return Format("int4_linear", step_bytes, warps=(16, 8, 4), constants=constants, folder="packed4")
    return Format("int4_linear", step_bytes, INTEGER_ROWS, x_bytes, constants=constants, folder="packed4")


def suits_cuda(x: torch.Tensor, weight: GroupScaled) -> bool:
    """Whether the kernel can multiply them. It copies 16 bytes at a time: 8 scales, for example."""
    if not x.is_cuda or x.itemsize != 2 or len(weight) % 16 or weight.zeros is None:
        return False
    tensors = (x, weight.packed, weight.scales, weight.zeros)
    return weight.scales.stride(0) % 8 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
