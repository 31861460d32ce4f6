"""Triton kernel of rotate_queries.py: a program has one token and a few of its heads, of either kind."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from .latent_write_triton import fp8_scale, rotate_pair

_HEADS_PER_PROGRAM = 16


@triton.jit
def _rotate_queries(
    x_ptr,
    cos_ptr,
    sin_ptr,
    query_ptr,
    index_query_ptr,
    scales_ptr,
    x_stride,
    cos_stride,
    query_stride,
    head_stride,
    tail,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)
    in_half = pair < HALF
    cos = tl.load(cos_ptr + token * cos_stride + pair, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * cos_stride + HALF + pair, mask=in_half, other=0.0).to(tl.float32)[None, :]
    dtype = query_ptr.dtype.element_ty
    programs: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H  # with attention heads; further ones have indexer heads
    number = tl.program_id(1)
    if number < programs:
        head = number * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (head < HEADS)[:, None] & in_half[None, :]
        turning = x_ptr + token * x_stride + (head * HEAD_DIM + HEAD_DIM - 2 * HALF)[:, None] + 2 * pair[None, :]
        x1 = tl.load(turning, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(turning + 1, mask=inside, other=0.0).to(tl.float32)
        rotated1, rotated2 = rotate_pair(x1, x2, cos, sin, dtype)
        end = query_ptr + token * query_stride + head[:, None] * head_stride + tail + pair[None, :]
        tl.store(end, rotated1, mask=inside)
        tl.store(end + HALF, rotated2, mask=inside)
    elif INDEX_HEADS > 0:
        head = (number - programs) * BLOCK_H + tl.arange(0, BLOCK_H)
        in_head = (head < INDEX_HEADS)[:, None]
        row = x_ptr + token * x_stride + HEADS * HEAD_DIM + head[:, None] * INDEX_DIM
        out = index_query_ptr + (token * INDEX_HEADS + head)[:, None] * INDEX_DIM
        first = (2 * pair if INTERLEAVED else pair)[None, :]
        step: tl.constexpr = 1 if INTERLEAVED else HALF
        inside = in_head & in_half[None, :]
        x1 = tl.load(row + first, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(row + first + step, mask=inside, other=0.0).to(tl.float32)
        turned1, turned2 = rotate_pair(x1, x2, cos, sin, dtype)
        column = tl.arange(0, BLOCK_REST)[None, :]
        kept = in_head & (column < REST)
        plain = tl.load(row + 2 * HALF + column, mask=kept, other=0.0)
        if FP8:
            turned = tl.maximum(tl.abs(turned1.to(tl.float32)), tl.abs(turned2.to(tl.float32)))
            largest = tl.maximum(tl.max(turned, 1), tl.max(tl.abs(plain.to(tl.float32)), 1))
            scale, inverse = fp8_scale(largest)
            tl.store(scales_ptr + token * INDEX_HEADS + head, scale, mask=head < INDEX_HEADS)
            turned1 = (turned1.to(tl.float32) * inverse[:, None]).to(tl.float8e4nv)
            turned2 = (turned2.to(tl.float32) * inverse[:, None]).to(tl.float8e4nv)
            plain = (plain.to(tl.float32) * inverse[:, None]).to(tl.float8e4nv)
        tl.store(out + pair[None, :], turned1, mask=inside)
        tl.store(out + HALF + pair[None, :], turned2, mask=inside)
        if REST > 0:
            tl.store(out + 2 * HALF + column, plain, mask=kept)


def launch_rotate_queries(
    x: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    query: torch.Tensor,
    index_query: torch.Tensor,
    scales: torch.Tensor | None,
    *,
    head_dim: int,
    interleaved: bool,
) -> None:
    """Fill the end of `query` and all of `index_query`, in fp8 if there are `scales` to fill."""
    tokens, heads, dim = query.shape
    _, index_heads, index_dim = index_query.shape
    rope_dim = cos.shape[1]
    programs = triton.cdiv(heads, _HEADS_PER_PROGRAM) + triton.cdiv(index_heads, _HEADS_PER_PROGRAM)
    _rotate_queries[(tokens, programs)](
        x,
        cos,
        signed_sin,
        query,
        index_query,
        scales,
        x.stride(0),
        cos.stride(0),
        *query.stride()[:2],
        dim - rope_dim,
        HEADS=heads,
        HEAD_DIM=head_dim,
        INDEX_HEADS=index_heads,
        INDEX_DIM=index_dim,
        REST=index_dim - rope_dim,
        BLOCK_REST=triton.next_power_of_2(max(index_dim - rope_dim, 1)),
        HALF=rope_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(rope_dim // 2),
        INTERLEAVED=interleaved,
        BLOCK_H=_HEADS_PER_PROGRAM,
        FP8=scales is not None,
        num_warps=4,
        **overlap_options(x.device),
    )
