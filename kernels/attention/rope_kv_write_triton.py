"""Triton kernel of rope_kv_write.py: one program per token and group of heads (of q, k or v)."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from .kv_write import FP8, FP8_MAX

_HEADS_PER_PROGRAM = 8


@triton.jit
def _round_to_pages(x, FP8_PAGES: tl.constexpr, LARGEST: tl.constexpr):
    if FP8_PAGES:
        x = tl.clamp(x.to(tl.float32), -LARGEST, LARGEST).to(tl.float8e4nv)
    return x


@triton.jit
def _rope_kv_write(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    key_ptr,
    value_ptr,
    page_ids_ptr,
    offsets_ptr,
    q_norm_ptr,
    k_norm_ptr,
    live_rows_ptr,
    query_ptr,
    cos_stride,
    page_stride,
    head_stride,
    token_stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    FP8_PAGES: tl.constexpr,
    LARGEST: tl.constexpr,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
    token = tl.program_id(0).to(tl.int64)
    # complete before the first overlapping kernel of the step, so it can be read before the previous kernel ends
    slot = tl.load(page_ids_ptr + token).to(tl.int64) * page_stride + tl.load(offsets_ptr + token) * token_stride
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    in_half = column < HALF
    if NORM:
        q_weight1 = tl.load(q_norm_ptr + column, mask=in_half, other=0.0).to(tl.float32)
        q_weight2 = tl.load(q_norm_ptr + HALF + column, mask=in_half, other=0.0).to(tl.float32)
        k_weight1 = tl.load(k_norm_ptr + column, mask=in_half, other=0.0).to(tl.float32)
        k_weight2 = tl.load(k_norm_ptr + HALF + column, mask=in_half, other=0.0).to(tl.float32)
    live = token < tl.load(live_rows_ptr) if PADDED else True
    if OVERLAP:
        wait_for_previous()
    if not live:
        return
    is_query = head < Q_HEADS
    is_key = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    is_value = (head >= Q_HEADS + KV_HEADS) & (head < Q_HEADS + 2 * KV_HEADS)
    inside = (head < Q_HEADS + 2 * KV_HEADS) & in_half

    qkv_row = qkv_ptr + token * ((Q_HEADS + 2 * KV_HEADS) * 2 * HALF) + head * (2 * HALF) + column
    first = tl.load(qkv_row, mask=inside, other=0.0)
    second = tl.load(qkv_row + HALF, mask=inside, other=0.0)
    dtype = first.dtype

    x1, x2 = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        mean = (tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / (2 * HALF)
        inverse = tl.rsqrt(mean + eps)[:, None]
        x1, x2 = x1 * inverse, x2 * inverse
        if q_norm_ptr.dtype.element_ty != tl.float32:  # as in rms_norm.py
            x1, x2 = x1.to(dtype).to(tl.float32), x2.to(dtype).to(tl.float32)
        x1 = x1 * tl.where(is_query, q_weight1, k_weight1)
        x2 = x2 * tl.where(is_query, q_weight2, k_weight2)
        x1, x2 = x1.to(dtype).to(tl.float32), x2.to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + token * cos_stride + column, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * cos_stride + HALF + column, mask=in_half, other=0.0).to(tl.float32)
    rotated1 = ((x1 * cos).to(dtype).to(tl.float32) - (x2 * sin).to(dtype).to(tl.float32)).to(dtype)
    rotated2 = ((x2 * cos).to(dtype).to(tl.float32) + (x1 * sin).to(dtype).to(tl.float32)).to(dtype)

    query = query_ptr + token * (Q_HEADS * 2 * HALF) + head * (2 * HALF) + column
    tl.store(query, rotated1, mask=is_query & in_half)
    tl.store(query + HALF, rotated2, mask=is_query & in_half)
    key = key_ptr + slot + (head - Q_HEADS) * head_stride + column
    tl.store(key, _round_to_pages(rotated1, FP8_PAGES, LARGEST), mask=is_key & in_half)
    tl.store(key + HALF, _round_to_pages(rotated2, FP8_PAGES, LARGEST), mask=is_key & in_half)
    value = value_ptr + slot + (head - Q_HEADS - KV_HEADS) * head_stride + column
    tl.store(value, _round_to_pages(first, FP8_PAGES, LARGEST), mask=is_value & in_half)
    tl.store(value + HALF, _round_to_pages(second, FP8_PAGES, LARGEST), mask=is_value & in_half)


def launch_rope_kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_ids: torch.Tensor,
    offsets: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    live_rows: torch.Tensor | None,
    query: torch.Tensor,
) -> None:
    tokens, q_heads, head_dim = query.shape
    kv_heads = key_pages.shape[1]
    _rope_kv_write[(tokens, triton.cdiv(q_heads + 2 * kv_heads, _HEADS_PER_PROGRAM))](
        qkv,
        cos,
        signed_sin,
        key_pages,
        value_pages,
        page_ids,
        offsets,
        q_norm,
        k_norm,
        live_rows,
        query,
        cos.stride(0),
        key_pages.stride(0),
        key_pages.stride(1),
        key_pages.stride(2),
        eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        HEADS=_HEADS_PER_PROGRAM,
        NORM=q_norm is not None,
        FP8_PAGES=key_pages.dtype == FP8,
        LARGEST=FP8_MAX,
        PADDED=live_rows is not None,
        num_warps=2,
        **overlap_options(qkv.device),
    )
