"""Triton kernel of head_linear.py: a program computes some outputs of a head for some tokens, over all columns.

It loads its weights before its input is ready, because no earlier kernel writes them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ..backends.occupancy import multiprocessors
from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous

_TOKENS = 64
_LEAST_OUTPUTS, _MOST_OUTPUTS = 16, 64


@triton.jit(do_not_specialize=["tokens"])
def _head_linear(
    x_ptr,
    weight_ptr,
    out_ptr,
    tokens,
    x_stride,
    x_head_stride,
    weight_head_stride,
    weight_stride,
    weight_out_stride,
    out_stride,
    out_head_stride,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
    head = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_K)
    weights = weight_ptr + head * weight_head_stride + column[:, None] * weight_stride
    weight = tl.load(
        weights + output[None, :] * weight_out_stride, mask=(column < K)[:, None] & (output < N)[None, :], other=0.0
    )
    if OVERLAP:
        wait_for_previous()
    inputs = x_ptr + head * x_head_stride + token.to(tl.int64)[:, None] * x_stride
    x = tl.load(inputs + column[None, :], mask=(token < tokens)[:, None] & (column < K)[None, :], other=0.0)
    result = tl.dot(x, weight, input_precision=PRECISION)
    out = out_ptr + head * out_head_stride + token.to(tl.int64)[:, None] * out_stride + output[None, :]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=(token < tokens)[:, None] & (output < N)[None, :])


def launch_head_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` [T, H, N]."""
    tokens, heads, columns = x.shape
    if tokens == 0:
        return
    outputs = weight.shape[2]
    block_t = max(min(triton.next_power_of_2(tokens), _TOKENS), 16)
    block_n = _MOST_OUTPUTS
    while block_n > _LEAST_OUTPUTS and heads * triton.cdiv(outputs, block_n) < multiprocessors(x.device) // 2:
        block_n //= 2
    _head_linear[(heads, triton.cdiv(outputs, block_n), triton.cdiv(tokens, block_t))](
        x,
        weight,
        out,
        tokens,
        *x.stride()[:2],
        *weight.stride(),
        *out.stride()[:2],
        K=columns,
        BLOCK_K=max(triton.next_power_of_2(columns), 16),
        N=outputs,
        BLOCK_N=block_n,
        BLOCK_T=block_t,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",  # tf32 would round float32 to 10 bits
        num_warps=4,
        **overlap_options(x.device),
    )
