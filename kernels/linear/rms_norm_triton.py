"""Triton kernel of rms_norm.py: one program per row."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous


@triton.jit
def _rms_norm(
    x_ptr, y_ptr, weight_ptr, sum_ptr, out_ptr, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if OVERLAP:
        start_next()
        wait_for_previous()
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0)
    if ADD:
        y = tl.load(y_ptr + row + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row + column, x, mask=inside)
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / size + eps)
    if weight_ptr.dtype.element_ty != tl.float32:
        normed = normed.to(x.dtype).to(tl.float32)
    out = normed * weight.to(tl.float32)
    tl.store(out_ptr + row + column, out.to(x.dtype), mask=inside)


def launch_rms_norm(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor,
    total: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
) -> None:
    rows, size = x.shape
    block = triton.next_power_of_2(size)
    _rms_norm[(rows,)](
        x,
        y,
        weight,
        total,
        out,
        size,
        eps,
        ADD=y is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **overlap_options(x.device),
    )
