"""Triton kernel of expert_gate.py: a program has a block of columns of one row."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from .clamped_gate import ALPHA

_ALPHA = tl.constexpr(ALPHA)
_MOST_COLUMNS = 1024


@triton.jit
def _expert_gate(
    products_ptr,
    ends_ptr,
    bias_ptr,
    out_ptr,
    experts,
    width,
    out_size,
    first,
    limit,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    row = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + index, mask=index < experts, other=2147483647)
    expert = tl.sum((ends <= row).to(tl.int32), 0)
    if expert == experts:
        return
    dtype = out_ptr.dtype.element_ty
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    products = products_ptr + row.to(tl.int64) * (2 * width if GATED else width)
    bias = bias_ptr
    if BIAS:
        bias += expert.to(tl.int64) * (2 * out_size if GATED else out_size) + (2 * first if CLAMPED else first)
    if not GATED:
        result = _biased(products, bias, column, inside, BIAS)
    else:
        if CLAMPED:
            pair = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
            both = _biased(products, bias, pair, pair < 2 * width, BIAS)
            gate, up = tl.split(tl.reshape(both, [BLOCK, 2]))
        else:
            gate = _biased(products, bias, column, inside, BIAS)
            up = _biased(products + width, bias + out_size if BIAS else bias, column, inside, BIAS)
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        if CLAMPED:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
            result = (up + 1.0) * (gate / (1.0 + tl.exp(-gate * _ALPHA)))
        else:
            result = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    tl.store(out_ptr + row.to(tl.int64) * out_size + first + column, result.to(dtype), mask=inside)


@triton.jit
def _biased(products, bias, column, inside, BIAS: tl.constexpr):
    result = tl.load(products + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return result


def launch_expert_gate(
    products: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    first: int,
    *,
    gated: bool,
    limit: float | None,
) -> None:
    """Fill columns of `out` from `first` on, in the rows of all experts."""
    rows, width = products.shape
    width //= 2 if gated else 1
    if rows == 0:
        return
    block = min(triton.next_power_of_2(width), _MOST_COLUMNS)
    _expert_gate[(rows, triton.cdiv(width, block))](
        products,
        ends,
        bias,
        out,
        len(ends),
        width,
        out.shape[1],
        first,
        0.0 if limit is None else limit,
        GATED=gated,
        CLAMPED=limit is not None,
        BIAS=bias is not None,
        EXPERTS=triton.next_power_of_2(len(ends)),
        BLOCK=block,
        num_warps=4,
        **overlap_options(out.device),
    )
