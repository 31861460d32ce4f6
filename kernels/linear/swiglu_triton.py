"""Triton kernel of swiglu.py: one program per block of a row."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous


@triton.jit
def activate(gate, GELU: tl.constexpr):
    """The activation of a gate, float32."""
    exponent = gate
    if GELU:
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # sqrt(8 / pi)
    return gate / (1.0 + tl.exp(-exponent))


@triton.jit
def _swiglu(gate_up_ptr, out_ptr, size, GELU: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        start_next()
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate_up_row = gate_up_ptr + row * 2 * size + column
    stored = tl.load(gate_up_row, mask=inside, other=0.0)
    up = tl.load(gate_up_row + size, mask=inside, other=0.0).to(tl.float32)
    gate = stored.to(tl.float32)
    active = activate(gate, GELU).to(stored.dtype).to(tl.float32)
    tl.store(out_ptr + row * size + column, (active * up).to(stored.dtype), mask=inside)


def launch_swiglu(gate_up: torch.Tensor, out: torch.Tensor, *, gelu: bool = False) -> None:
    rows, size = out.shape
    block = min(triton.next_power_of_2(size), 1024)
    _swiglu[(rows, triton.cdiv(size, block))](
        gate_up, out, size, GELU=gelu, BLOCK=block, num_warps=4, **overlap_options(out.device)
    )
