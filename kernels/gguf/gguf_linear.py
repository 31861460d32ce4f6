"""Linear layers with weights in GGUF blocks (blocks.py), on the CPU. They are computed in three ways:

    interleaved blocks        Numba: multiplied as integers (interleaved.py)
    others, few rows of x     Numba: multiplied as they are read or, for several rows, unpacked into the cache
    others, many rows of x    some rows of the weights at a time are unpacked for torch's product

All compute x @ weight.T + bias. Shapes: x [rows, in] float32; weight [out, in]; bias [out] or None; result [rows, out].
Weights are not rounded. For interleaved blocks, x is rounded: each 32 elements become 16-bit integers with a common
scale (`pack_row`), with an error of at most 1.6e-5 of the largest of them. For other blocks, results differ from those
of expanded weights only by the order of additions. With `gated`, swiglu is applied: `weight` has the rows of gate, then
those of up, and the result is [rows, out / 2].

Lower bound for one row: the packed weights read once, a seventh of float32 for Q4_0. In AVX-512, the arithmetic takes
13 vector instructions for 32 weights of Q4_1, of which two can start per cycle; for interleaved blocks it takes 3.5,
and 8 in NEON.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import linear as torch_linear

from ..backends.dispatch import Impl, launcher, use_numba
from .blocks import GgufBlocks, GgufRows
from .interleaved import plain_rows

FEW_ROWS = 32
"""Up to this many rows of x are few: at 32, the Numba kernel takes three quarters of the time (AVX-512)."""
SCRATCH_BYTES = 4 << 20
"""Unpacked weights in memory at a time: the cache holds them, and torch's products of them are efficient."""


def gguf_linear_reference(x: torch.Tensor, weight: GgufBlocks, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch_linear(x, weight.expanded(), bias)


def gguf_linear(
    x: torch.Tensor, weight: GgufBlocks, bias: torch.Tensor | None = None, *, impl: Impl = "auto"
) -> torch.Tensor:
    """A linear layer; see the module docstring."""
    if not _numba_fits(x, weight, bias, impl):
        return gguf_linear_reference(x, weight, bias)
    rows = x.shape[0]  # `len` of a tensor takes microseconds, and a step makes a hundred calls
    out = x.new_empty(rows, len(weight))
    if len(weight.parts) == 1:
        _part_product(x, weight.parts[0], bias, out)
        return out
    first = 0
    for part in weight.parts:
        held = slice(first, first + len(part.blocks))
        _part_product(x, part, None if bias is None else bias[held], out[:, held])
        first = held.stop
    return out


def gguf_gated_linear(
    x: torch.Tensor, weight: GgufBlocks, bias: torch.Tensor | None = None, *, gelu: bool = False, impl: Impl = "auto"
) -> torch.Tensor | None:
    """swiglu(gguf_linear(x)) in one kernel. Returns None if no kernel can: for many rows with blocks that are not
    interleaved, and if gate and up have different types.
    """
    rows = x.shape[0]
    if (
        not rows
        or len(weight.parts) > 1
        or not _is_multiplied_packed(rows, weight.parts[0])
        or not _numba_fits(x, weight, bias, impl)
    ):
        return None
    out = x.new_empty(rows, len(weight) // 2)
    _linear_launcher(weight.parts[0])(x, weight.parts[0], bias, out, gated=True, gelu=gelu)
    return out


def gguf_rows(weight: GgufBlocks, indices: torch.Tensor, *, impl: Impl = "auto") -> torch.Tensor:
    """Rows of a matrix of one type in float32, for embeddings."""
    (part,) = weight.parts
    if part.interleaved:
        blocks = plain_rows(part.blocks, part.type_name, indices)
    else:
        blocks = part.blocks.index_select(0, indices)
    wanted = GgufRows(blocks, part.type_name)
    out = torch.empty(len(indices), weight.columns)
    if not len(indices):
        return out
    if not use_numba(impl):
        return wanted.expanded()
    launcher("numba.gguf_linear", "launch_unpack")(wanted, out)
    return out


def _is_multiplied_packed(rows: int, weight: GgufRows) -> bool:
    return weight.interleaved or rows <= FEW_ROWS


def _part_product(x: torch.Tensor, weight: GgufRows, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if not _is_multiplied_packed(x.shape[0], weight):
        _many_rows(x, weight, bias, out)
    elif x.shape[0]:
        _linear_launcher(weight)(x, weight, bias, out, gated=False)


def _linear_launcher(weight: GgufRows) -> Callable[..., None]:
    return launcher("numba.interleaved_linear" if weight.interleaved else "numba.gguf_linear", "launch_linear")


def _many_rows(x: torch.Tensor, weight: GgufRows, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    count, columns = weight.blocks.shape[0], weight.columns
    step = min(count, max(1, SCRATCH_BYTES // (4 * columns)))
    scratch, unpack = torch.empty(step, columns), launcher("numba.gguf_linear", "launch_unpack")
    for first in range(0, count, step):
        part = slice(first, min(first + step, count))
        unpacked = scratch[: part.stop - first]
        unpack(GgufRows(weight.blocks[part], weight.type_name), unpacked)
        if bias is None:
            torch.mm(x, unpacked.t(), out=out[:, part])
        else:
            torch.addmm(bias[part], x, unpacked.t(), out=out[:, part])


def _numba_fits(x: torch.Tensor, weight: GgufBlocks, bias: torch.Tensor | None, impl: Impl) -> bool:
    if x.ndim != 2 or x.shape[1] != weight.columns or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(
            f"{x.dtype} x {list(x.shape)} must be contiguous float32 rows as long as those of weight "
            f"{list(weight.shape)}"
        )
    if bias is not None and len(bias) != len(weight):
        raise ValueError(f"bias {list(bias.shape)} must have an element for each row of weight {list(weight.shape)}")
    return use_numba(impl, x, *(() if bias is None else (bias,)))
