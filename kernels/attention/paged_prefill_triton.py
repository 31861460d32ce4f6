"""Kernels of paged_attention.py for sequences with several queries.

Keys and values are first copied out of their pages into one contiguous tensor per head, in the dtype of the queries.
This takes a few percent of the time, and lets the tensor memory accelerator (TMA) feed the matrix units, which is 30%
faster (H200). Then the CUDA kernel of paged_prefill_cuda.py attends, where it supports the geometry, or the Triton
kernel of this file. A program of the latter processes a tile of queries (half a tile if rows are wide) and one query
head: first the keys that all its queries see, then the diagonal.

Lower bound: 4 * D * Hq * (pairs of a query and a visible key) operations.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803  (compile-time parameters are written in capitals)

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from .attention_plan import COPY_TOKENS, TILE_QUERIES, WorkPlan
from .page_rows_triton import load_page_rows
from .paged_prefill_cuda import launch_tiles, supports

_MOST_COPY_PROGRAMS = 256
"""Programs per KV head that copy; each copies several blocks if there are more."""


@triton.jit(do_not_specialize=["copies_stride"])
def _copy_out(
    key_ptr,
    value_ptr,
    pages_ptr,
    page_starts_ptr,
    kv_lens_ptr,
    copies_ptr,
    copy_starts_ptr,
    counts_ptr,
    keys_ptr,
    values_ptr,
    copies_stride,
    copied_tokens,
    page_stride,
    head_stride,
    token_stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SWIZZLED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    head = tl.program_id(0)
    column = tl.arange(0, BLOCK_D)
    row = tl.arange(0, BLOCK)
    keys, values = key_ptr + head * head_stride, value_ptr + head * head_stride
    for number in range(tl.program_id(1), tl.load(counts_ptr + 2), tl.num_programs(1)):
        sequence = tl.load(copies_ptr + number)
        first = tl.load(copies_ptr + copies_stride + number)
        kv_len = tl.load(kv_lens_ptr + sequence)
        pages = pages_ptr + tl.load(page_starts_ptr + sequence)
        key = load_page_rows(pages, keys, first, kv_len, page_stride, token_stride, column, D, PAGE, BLOCK)
        value = load_page_rows(pages, values, first, kv_len, page_stride, token_stride, column, D, PAGE, BLOCK)
        key, value = key.to(keys_ptr.dtype.element_ty), value.to(values_ptr.dtype.element_ty)
        # rows past the end are written as zeros: they may hold NaN, and 0 * NaN is not 0
        start = (head * copied_tokens + tl.load(copy_starts_ptr + sequence) + first).to(tl.int64) * D
        if SWIZZLED:
            # halves of 64 elements, one after the other; word w of 8 elements of a row is at w ^ row % 8
            word = tl.arange(0, BLOCK_D // 8)
            place = (
                (word // 8)[None, :] * (BLOCK * 64) + row[:, None] * 64 + ((word % 8)[None, :] ^ (row % 8)[:, None]) * 8
            )
            target = start + place[:, :, None] + tl.arange(0, 8)[None, None, :]
            tl.store(keys_ptr + target, tl.reshape(key, (BLOCK, BLOCK_D // 8, 8)))
            tl.store(values_ptr + target, tl.reshape(value, (BLOCK, BLOCK_D // 8, 8)))
        else:
            target = start + row[:, None] * D + column[None, :]
            tl.store(keys_ptr + target, key, mask=(column < D)[None, :])
            tl.store(values_ptr + target, value, mask=(column < D)[None, :])


@triton.jit
def _attend(
    query,
    acc,
    top,
    total,
    position,
    base,
    low,
    high,
    keys,
    values,
    scale_log2,
    BLOCK: tl.constexpr,
    DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add keys [low, high) to a tile's running softmax. Off the diagonal, all queries see all of these keys."""
    for first in range(low, high, BLOCK):
        key = keys.load([base + first, 0])
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if DIAGONAL:
            seen = position[:, None] >= first + tl.arange(0, BLOCK)[None, :]
            score = tl.where(seen, score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * scale_log2)
        weight = tl.exp2(score * scale_log2 - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 1)
        value = values.load([base + first, 0])
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["tiles_stride"])
def _prefill_tiles(
    query_ptr,
    keys,
    values,
    kv_lens_ptr,
    query_lens_ptr,
    row_starts_ptr,
    tiles_ptr,
    copy_starts_ptr,
    out_ptr,
    tiles_stride,
    copied_tokens,
    query_stride,
    scale_log2,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    head, heads = tl.program_id(0), tl.num_programs(0)
    tile = tiles_ptr + tl.program_id(1)
    sequence = tl.load(tile)
    first_query = tl.load(tile + tiles_stride) + tl.program_id(2) * ROWS
    query_len = tl.load(query_lens_ptr + sequence)
    if first_query >= query_len:
        return
    kv_len = tl.load(kv_lens_ptr + sequence)
    row_start = tl.load(row_starts_ptr + sequence).to(tl.int64)
    base = (head // GROUP) * copied_tokens + tl.load(copy_starts_ptr + sequence)

    number = first_query + tl.arange(0, ROWS)
    # rows past the end compute what the last query does, and are not stored
    position = kv_len - query_len + tl.minimum(number, query_len - 1)
    column = tl.arange(0, BLOCK_D)
    inside = (number < query_len)[:, None] & (column < D)[None, :]
    row = row_start + number
    query = tl.load(query_ptr + row[:, None] * query_stride + head * D + column[None, :], mask=inside, other=0.0)

    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    # [0, seen_by_all) whole blocks without a mask; [seen_by_all, last) the diagonal
    seen_by_all = (kv_len - query_len + first_query + 1) // BLOCK * BLOCK
    last = tl.minimum(kv_len - query_len + first_query + ROWS, kv_len)
    acc, top, total = _attend(
        query, acc, top, total, position, base, 0, seen_by_all, keys, values, scale_log2, BLOCK, False, PRECISION
    )
    acc, top, total = _attend(
        query, acc, top, total, position, base, seen_by_all, last, keys, values, scale_log2, BLOCK, True, PRECISION
    )
    out = out_ptr + (row * heads + head)[:, None] * D + column[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def launch_prefill(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    plan: WorkPlan,
    out: torch.Tensor,
    *,
    scale: float,
    last_only: bool,
) -> None:
    """Fill the rows of `out` whose sequences are in the plan's tiles; with `last_only`, at least their last rows."""
    _, heads, head_dim = query.shape
    kv_heads, page_size = key_pages.shape[1:3]
    block_d = max(triton.next_power_of_2(head_dim), 16)
    # float32 products are element-wise, which takes minutes to compile for large tiles
    wide = query.dtype == torch.float32 or query.dtype.itemsize * block_d > 256
    rows, block = (TILE_QUERIES // 2, 32) if wide else (TILE_QUERIES, 128)
    copied = plan.copied
    if copied is None:
        copied = query.new_empty(2, kv_heads * plan.copied_tokens, head_dim)
    keys, values = copied.unbind()
    use_cuda = plan.allow_cuda and supports(query)
    _copy_out[(kv_heads, min(plan.copies.shape[1], _MOST_COPY_PROGRAMS))](
        key_pages,
        value_pages,
        plan.pages,
        plan.page_starts,
        plan.kv_lens,
        plan.copies,
        plan.copy_starts,
        plan.counts,
        keys,
        values,
        plan.copies.stride(0),
        plan.copied_tokens,
        *key_pages.stride()[:3],
        D=head_dim,
        BLOCK_D=block_d,
        PAGE=page_size,
        BLOCK=COPY_TOKENS,
        SWIZZLED=use_cuda,
        num_warps=8,
        **overlap_options(query.device),
    )
    if use_cuda:
        launch_tiles(query, keys, values, plan, out, scale=scale, last_only=last_only)
        return
    tiles = plan.last_tiles if last_only else plan.tiles
    _prefill_tiles[(heads, tiles.shape[1], TILE_QUERIES // rows)](
        query,
        TensorDescriptor.from_tensor(keys, [block, block_d]),
        TensorDescriptor.from_tensor(values, [block, block_d]),
        plan.kv_lens,
        plan.query_lens,
        plan.row_starts,
        tiles,
        plan.copy_starts,
        out,
        tiles.stride(0),
        plan.copied_tokens,
        query.stride(0),
        scale / math.log(2),
        GROUP=heads // kv_heads,
        ROWS=rows,
        D=head_dim,
        BLOCK_D=block_d,
        BLOCK=block,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",  # tf32 would round float32 to 10 bits
        num_warps=4 if wide else 8,
        num_stages=2 if wide else 3,
        **overlap_options(query.device),
    )
