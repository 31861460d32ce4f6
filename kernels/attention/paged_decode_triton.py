"""Triton kernels of paged_attention.py for sequences with one query.

A program processes one piece of one sequence's keys for one KV head. Its query heads are the rows of the matrix
products, so keys and values are read once for all of them. If a sequence has several pieces (split-K), each program
stores a partial result and its log-sum, and `_decode_combine` combines them.

Lower bound: the keys and values in use, read once: 2 * sum(kv_lens) * Hkv * D elements.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import math

import torch
import triton
import triton.language as tl

from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from .attention_plan import PIECE_TOKENS, WorkPlan
from .page_rows_triton import add_sinks, load_page_rows

_COMBINED_ELEMENTS = 8192
"""Elements of partial results that are combined at a time: as many as registers hold."""


@triton.jit(do_not_specialize=["pieces_stride"])
def _decode_pieces(
    query_ptr,
    key_ptr,
    value_ptr,
    pages_ptr,
    page_starts_ptr,
    row_starts_ptr,
    pieces_ptr,
    piece_starts_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    pieces_stride,
    query_stride,
    page_stride,
    head_stride,
    token_stride,
    scale_log2,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
    kv_head = tl.program_id(0)
    piece = pieces_ptr + tl.program_id(1)
    # the plan was written before this step, so it is read before the previous kernel ends
    start = tl.load(piece + pieces_stride)
    end = tl.load(piece + 2 * pieces_stride)
    sequence = tl.load(piece)
    number = tl.load(piece + 3 * pieces_stride)
    if start >= end:
        if OVERLAP and tl.program_id(1) == 0:  # the kernel must not end before the previous one, even if it is empty
            wait_for_previous()
        return
    alone = tl.load(piece_starts_ptr + sequence + 1) - tl.load(piece_starts_ptr + sequence) == 1
    row = tl.load(row_starts_ptr + sequence).to(tl.int64)
    pages = pages_ptr + tl.load(page_starts_ptr + sequence)
    if OVERLAP:  # for queries and the newest keys
        wait_for_previous()

    member = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    in_head = column < D
    head = kv_head * GROUP + member
    inside = (member < GROUP)[:, None] & in_head[None, :]
    query = tl.load(query_ptr + row * query_stride + head[:, None] * D + column[None, :], mask=inside, other=0.0)
    keys = key_ptr + kv_head * head_stride
    values = value_ptr + kv_head * head_stride

    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in range(start, end, BLOCK):
        key = load_page_rows(pages, keys, first, end, page_stride, token_stride, column, D, PAGE, BLOCK)
        value = load_page_rows(pages, values, first, end, page_stride, token_stride, column, D, PAGE, BLOCK)
        key, value = key.to(query.dtype), value.to(query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale_log2
        score = tl.where((first + tl.arange(0, BLOCK) < end)[None, :], score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(score - new_top[:, None])
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top

    place = head[:, None] * D + column[None, :]
    if alone:
        if SINKS:
            acc, total = add_sinks(acc, top, total, sinks_ptr + head, member < GROUP)
        result = acc / total[:, None]
        out = out_ptr + row * (tl.num_programs(0) * GROUP * D) + place
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        slot = number.to(tl.int64) * (tl.num_programs(0) * GROUP)
        tl.store(partial_ptr + slot * D + place, acc / total[:, None], mask=inside)
        tl.store(log_sum_ptr + slot + head, top + tl.log2(total), mask=member < GROUP)


@triton.jit
def _decode_combine(
    partial_ptr,
    log_sum_ptr,
    piece_starts_ptr,
    row_starts_ptr,
    sinks_ptr,
    out_ptr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
    head, heads = tl.program_id(0), tl.num_programs(0)
    sequence = tl.program_id(1)
    start = tl.load(piece_starts_ptr + sequence)
    end = tl.load(piece_starts_ptr + sequence + 1)
    row = tl.load(row_starts_ptr + sequence).to(tl.int64)
    if OVERLAP:
        wait_for_previous()
    if end - start <= 1:
        return
    column = tl.arange(0, BLOCK_D)
    top = -float("inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(start, end, BLOCK):
        number = first + tl.arange(0, BLOCK)
        slot = number.to(tl.int64) * heads + head
        log_sum = tl.load(log_sum_ptr + slot, mask=number < end, other=-float("inf"))
        inside = (number < end)[:, None] & (column < D)[None, :]
        partial = tl.load(partial_ptr + slot[:, None] * D + column[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(log_sum, 0))
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(log_sum - new_top)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(partial * weight[:, None], 0)
        top = new_top
    if SINKS:
        sink = tl.load(sinks_ptr + head) * 1.4426950408889634  # log2(e)
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.exp2(sink - new_top)
        acc = acc * shrink
    out = out_ptr + (row * heads + head) * D + column
    tl.store(out, (acc / total).to(out_ptr.dtype.element_ty), mask=column < D)


def launch_decode(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    plan: WorkPlan,
    out: torch.Tensor,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> None:
    """Fill the rows of `out` whose sequences are in the plan's pieces."""
    _, heads, head_dim = query.shape
    kv_heads, page_size = key_pages.shape[1:3]
    group, pieces = heads // kv_heads, plan.pieces.shape[1]
    block_d = max(triton.next_power_of_2(head_dim), 16)
    page_stride, head_stride, token_stride, _ = key_pages.stride()
    partial = torch.empty(pieces, heads, head_dim, dtype=torch.float32, device=query.device)
    log_sum = torch.empty(pieces, heads, dtype=torch.float32, device=query.device)
    _decode_pieces[(kv_heads, pieces)](
        query,
        key_pages,
        value_pages,
        plan.pages,
        plan.page_starts,
        plan.row_starts,
        plan.pieces,
        plan.piece_starts,
        sinks,
        out,
        partial,
        log_sum,
        plan.pieces.stride(0),
        query.stride(0),
        page_stride,
        head_stride,
        token_stride,
        scale / math.log(2),
        GROUP=group,
        ROWS=max(triton.next_power_of_2(group), 16),
        D=head_dim,
        BLOCK_D=block_d,
        PAGE=page_size,
        BLOCK=PIECE_TOKENS if query.dtype.itemsize * block_d <= 256 else PIECE_TOKENS // 2,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",  # tf32 would round float32 to 10 bits
        SINKS=sinks is not None,
        num_warps=4,
        num_stages=3,
        **overlap_options(query.device),
    )
    _decode_combine[(heads, len(plan.row_starts))](
        partial,
        log_sum,
        plan.piece_starts,
        plan.row_starts,
        sinks,
        out,
        D=head_dim,
        BLOCK_D=block_d,
        BLOCK=min(64, _COMBINED_ELEMENTS // block_d),
        SINKS=sinks is not None,
        num_warps=2,
        **overlap_options(query.device),
    )
