"""Kernels of paged_attention.py for sequences with several queries.

Keys and values are first copied out of their pages into one contiguous tensor per head, in the dtype of the queries.
This takes a few percent of the time, and allows attention to load keys and values with the tensor memory accelerator
(TMA), which is 30% faster (H200). Then the CUDA kernel of paged_prefill_cuda.py computes attention if it supports the
geometry; it supports neither windows nor sinks. Otherwise the Triton kernel of this file does. Its program processes a
tile of queries (half a tile if rows are wide) and one query head: first the keys at the start of the window, if there
is one, then the keys that all its queries see, then the diagonal.

Lower bound: 4 * D * Hq * (pairs of a query and a visible key) operations.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from .attention_plan import COPY_TOKENS, TILE_QUERIES, WorkPlan
from .page_rows_triton import add_sinks, load_page_rows
from .paged_prefill_cuda import launch_tiles, supports

_COMBINED_ROWS = 16
"""Queries for which a program combines the results of parts."""
_MOST_COPY_PROGRAMS = 256
"""Programs per KV head that copy; each copies several blocks if there are more."""


@triton.jit(do_not_specialize=["copies_stride"])
def _copy_out(
    key_ptr,
    value_ptr,
    pages_ptr,
    page_starts_ptr,
    kv_lens_ptr,
    query_lens_ptr,
    copies_ptr,
    copy_starts_ptr,
    num_copies_ptr,
    keys_ptr,
    values_ptr,
    copies_stride,
    copied_tokens,
    page_stride,
    head_stride,
    token_stride,
    window,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SWIZZLED: tl.constexpr,
    WINDOWED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    head = tl.program_id(0)
    column = tl.arange(0, BLOCK_D)
    row = tl.arange(0, BLOCK)
    keys, values = key_ptr + head * head_stride, value_ptr + head * head_stride
    for number in range(tl.program_id(1), tl.load(num_copies_ptr), tl.num_programs(1)):
        sequence = tl.load(copies_ptr + number)
        first = tl.load(copies_ptr + copies_stride + number)
        kv_len = tl.load(kv_lens_ptr + sequence)
        pages = pages_ptr + tl.load(page_starts_ptr + sequence)
        key = load_page_rows(pages, keys, first, kv_len, page_stride, token_stride, column, D, PAGE, BLOCK)
        value = load_page_rows(pages, values, first, kv_len, page_stride, token_stride, column, D, PAGE, BLOCK)
        key, value = key.to(keys_ptr.dtype.element_ty), value.to(values_ptr.dtype.element_ty)
        # rows that no query sees are written as zeros: they may hold NaN, and 0 * NaN is not 0
        if WINDOWED:
            seen = first + row > kv_len - tl.load(query_lens_ptr + sequence) - window
            key, value = tl.where(seen[:, None], key, 0.0), tl.where(seen[:, None], value, 0.0)
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
    window,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add keys [low, high) to a tile's running softmax. Unless MASKED, all queries see all of these keys."""
    for first in range(low, high, BLOCK):
        key = keys.load([base + first, 0])
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if MASKED:
            distance = position[:, None] - (first + tl.arange(0, BLOCK)[None, :])
            seen = distance >= 0
            if WINDOWED:
                seen = seen & (distance < window)
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
    sinks_ptr,
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    tiles_stride,
    copied_tokens,
    query_stride,
    scale_log2,
    window,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    COPIED: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
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
    first_key = tl.load(tile + 2 * tiles_stride) * COPIED
    end_key = tl.load(tile + 3 * tiles_stride) * COPIED
    part = tl.load(tile + 4 * tiles_stride)
    query_len = tl.load(query_lens_ptr + sequence)
    if first_query >= query_len:
        return
    kv_len = tl.load(kv_lens_ptr + sequence)
    row_start = tl.load(row_starts_ptr + sequence).to(tl.int64)
    base = (head // GROUP) * copied_tokens + tl.load(copy_starts_ptr + sequence)

    number = first_query + tl.arange(0, ROWS)
    # rows after the last query repeat it, and are not stored
    position = kv_len - query_len + tl.minimum(number, query_len - 1)
    column = tl.arange(0, BLOCK_D)
    inside = (number < query_len)[:, None] & (column < D)[None, :]
    row = row_start + number
    query = tl.load(query_ptr + row[:, None] * query_stride + head * D + column[None, :], mask=inside, other=0.0)

    top = tl.full([ROWS], -1e30, tl.float32)  # finite: a query may see no key of a part
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    # [first_key, edge) the start of the window; [edge, seen_by_all) whole blocks without a mask;
    # [seen_by_all, last) the diagonal
    first_position = kv_len - query_len + first_query
    seen_by_all = (first_position + 1) // BLOCK * BLOCK
    seen_by_all = tl.minimum(tl.maximum(seen_by_all, first_key), end_key)
    last = tl.minimum(tl.minimum(first_position + ROWS, kv_len), end_key)
    edge = first_key
    if WINDOWED:
        first_key = tl.maximum(first_key, tl.maximum(first_position - window + 1, 0) // BLOCK * BLOCK)
        # the last query sees the fewest of the first keys
        edge = (tl.maximum(first_position + ROWS - window, 0) + BLOCK - 1) // BLOCK * BLOCK
        edge = tl.maximum(edge, first_key)
        seen_by_all = tl.maximum(seen_by_all, edge)
        acc, top, total = _attend(
            query,
            acc,
            top,
            total,
            position,
            base,
            first_key,
            tl.minimum(edge, last),
            keys,
            values,
            scale_log2,
            window,
            BLOCK,
            True,
            True,
            PRECISION,
        )
    acc, top, total = _attend(
        query,
        acc,
        top,
        total,
        position,
        base,
        edge,
        seen_by_all,
        keys,
        values,
        scale_log2,
        window,
        BLOCK,
        False,
        WINDOWED,
        PRECISION,
    )
    acc, top, total = _attend(
        query,
        acc,
        top,
        total,
        position,
        base,
        seen_by_all,
        last,
        keys,
        values,
        scale_log2,
        window,
        BLOCK,
        True,
        WINDOWED,
        PRECISION,
    )
    if part < 0:
        if SINKS:
            acc, total = add_sinks(acc, top, total, sinks_ptr + head + tl.zeros_like(number), number >= 0)
        out = out_ptr + (row * heads + head)[:, None] * D + column[None, :]
        tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        sees_any = total > 0  # a query before this part's keys sees none of them
        in_tile = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        slot = (part * heads + head).to(tl.int64) * TILE + in_tile
        result = acc / tl.where(sees_any, total, 1.0)[:, None]
        tl.store(partial_ptr + slot[:, None] * D + column[None, :], result, mask=(column < D)[None, :])
        tl.store(log_sum_ptr + slot, tl.where(sees_any, top + tl.log2(total), -float("inf")))


@triton.jit(do_not_specialize=["splits_stride"])
def _combine_parts(
    partial_ptr,
    log_sum_ptr,
    splits_ptr,
    counts_ptr,
    query_lens_ptr,
    row_starts_ptr,
    sinks_ptr,
    out_ptr,
    splits_stride,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    if tl.program_id(1) >= tl.load(counts_ptr + 1):
        return
    head, heads = tl.program_id(0), tl.num_programs(0)
    split = splits_ptr + tl.program_id(1)
    sequence = tl.load(split)
    in_tile = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    number = tl.load(split + splits_stride) + in_tile
    inside = number < tl.load(query_lens_ptr + sequence)
    column = tl.arange(0, BLOCK_D)
    top = tl.full([ROWS], -1e30, tl.float32)  # finite: a query may see no key of a part
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for part in range(tl.load(split + 2 * splits_stride), tl.load(split + 3 * splits_stride)):
        slot = (part * heads + head).to(tl.int64) * TILE + in_tile
        log_sum = tl.load(log_sum_ptr + slot, mask=inside, other=-float("inf"))
        columns = partial_ptr + slot[:, None] * D + column[None, :]
        partial = tl.load(columns, mask=inside[:, None] & (column < D)[None, :], other=0.0)
        new_top = tl.maximum(top, log_sum)
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(log_sum - new_top)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + partial * weight[:, None]
        top = new_top
    if SINKS:
        acc, total = add_sinks(acc, top, total, sinks_ptr + head + tl.zeros_like(number), inside)
    row = tl.load(row_starts_ptr + sequence).to(tl.int64) + number
    out = out_ptr + (row * heads + head)[:, None] * D + column[None, :]
    result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out, result, mask=inside[:, None] & (column < D)[None, :])


def launch_prefill(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    plan: WorkPlan,
    out: torch.Tensor,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
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
    use_cuda = plan.allow_cuda and plan.window is None and sinks is None and supports(query)
    _copy_out[(kv_heads, min(plan.copies.shape[1], _MOST_COPY_PROGRAMS))](
        key_pages,
        value_pages,
        plan.pages,
        plan.page_starts,
        plan.kv_lens,
        plan.query_lens,
        plan.copies,
        plan.copy_starts,
        plan.num_copies,
        keys,
        values,
        plan.copies.stride(0),
        plan.copied_tokens,
        *key_pages.stride()[:3],
        plan.window or 0,
        D=head_dim,
        BLOCK_D=block_d,
        PAGE=page_size,
        BLOCK=COPY_TOKENS,
        SWIZZLED=use_cuda,
        WINDOWED=plan.window is not None,
        num_warps=8,
        **overlap_options(query.device),
    )
    tiles = plan.last_tiles if last_only else plan.tiles
    most_parts = plan.most_parts if tiles.splits.shape[1] else 0
    partial = torch.empty(most_parts, heads, TILE_QUERIES, head_dim, dtype=torch.float32, device=query.device)
    log_sum = torch.empty(most_parts, heads, TILE_QUERIES, dtype=torch.float32, device=query.device)
    if use_cuda:
        launch_tiles(query, keys, values, plan, tiles, partial, log_sum, out, scale=scale)
    else:
        _prefill_tiles[(heads, tiles.tiles.shape[1], TILE_QUERIES // rows)](
            query,
            TensorDescriptor.from_tensor(keys, [block, block_d]),
            TensorDescriptor.from_tensor(values, [block, block_d]),
            plan.kv_lens,
            plan.query_lens,
            plan.row_starts,
            tiles.tiles,
            plan.copy_starts,
            sinks,
            out,
            partial,
            log_sum,
            tiles.tiles.stride(0),
            plan.copied_tokens,
            query.stride(0),
            scale / math.log(2),
            plan.window or 0,
            GROUP=heads // kv_heads,
            TILE=TILE_QUERIES,
            COPIED=COPY_TOKENS,
            ROWS=rows,
            D=head_dim,
            BLOCK_D=block_d,
            BLOCK=block,
            WINDOWED=plan.window is not None,
            SINKS=sinks is not None,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",  # tf32 would round float32 to 10 bits
            num_warps=4 if wide else 8,
            num_stages=2 if wide else 3,
            **overlap_options(query.device),
        )
    if tiles.splits.shape[1]:
        _combine_parts[(heads, tiles.splits.shape[1], TILE_QUERIES // _COMBINED_ROWS)](
            partial,
            log_sum,
            tiles.splits,
            tiles.counts,
            plan.query_lens,
            plan.row_starts,
            sinks,
            out,
            tiles.splits.stride(0),
            TILE=TILE_QUERIES,
            ROWS=_COMBINED_ROWS,
            SINKS=sinks is not None,
            D=head_dim,
            BLOCK_D=block_d,
            num_warps=4,
            **overlap_options(query.device),
        )
