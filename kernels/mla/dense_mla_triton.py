"""Triton kernels of dense_mla.py.

A program processes one piece of a tile's keys and up to 64 rows of the tile, where a row is one head of one query. All
rows share the keys, so a cache row is read once for all of them; with 128 heads, the second program reads it from the
L2 cache. A cache row's first `value_dim` elements are loaded once and used twice, as key and as value. If a tile has
several pieces (split-K), the programs store partial results and log-sums, and `_combine` combines them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from .tile_plan import TilePlan

_COMBINED_AT_ONCE = 16

_LOWEST = tl.constexpr(-1e30)
"""Below every score, but finite: the difference of two maxima over no keys is 0, not NaN."""


@triton.jit(do_not_specialize=["pieces_stride"])
def _attend(
    query_ptr,
    pages_ptr,
    page_ids_ptr,
    pieces_ptr,
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    pieces_stride,
    page_stride,
    slot_stride,
    scale_log2,
    HEADS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    row_blocks: tl.constexpr = (TILE_ROWS + BLOCK_M - 1) // BLOCK_M
    piece = pieces_ptr + tl.program_id(0) // row_blocks
    first_row = tl.program_id(0) % row_blocks * BLOCK_M
    rows = tl.load(piece + 2 * pieces_stride) * HEADS
    if first_row >= rows:
        return
    page_ids_ptr += tl.load(piece)
    query_row = tl.load(piece + pieces_stride).to(tl.int64) * HEADS
    visible = tl.load(piece + 3 * pieces_stride)
    start = tl.load(piece + 4 * pieces_stride)
    end = tl.load(piece + 5 * pieces_stride)
    partial = tl.load(piece + 6 * pieces_stride)

    row = first_row + tl.arange(0, BLOCK_M)
    limit = tl.minimum(visible + row // HEADS, end)  # the keys that a row sees
    value_column = tl.arange(0, BLOCK_V)
    rest_column = VALUE + tl.arange(0, BLOCK_R)
    in_value = value_column < VALUE
    in_rest = rest_column < VALUE + REST
    in_rows = row < rows
    queries = query_ptr + (query_row + row)[:, None] * (VALUE + REST)
    query = tl.load(queries + value_column[None, :], mask=in_rows[:, None] & in_value[None, :], other=0.0)
    if REST > 0:
        query_rest = tl.load(queries + rest_column[None, :], mask=in_rows[:, None] & in_rest[None, :], other=0.0)
    top = tl.full([BLOCK_M], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    weight = tl.zeros([BLOCK_M, BLOCK], query.dtype)
    shrink = tl.zeros([BLOCK_M], tl.float32)
    key = start + tl.arange(0, BLOCK)
    next_page = tl.load(page_ids_ptr + key // PAGE, mask=key < end, other=0)
    for first in range(start, end, BLOCK):
        # loaded one iteration ahead, outside Triton's pipelined loads, which would need another buffer for it
        key = first + tl.arange(0, BLOCK)
        place = pages_ptr + next_page.to(tl.int64) * page_stride + (key % PAGE).to(tl.int64) * slot_stride
        next_page = tl.load(page_ids_ptr + (key + BLOCK) // PAGE, mask=key + BLOCK < end, other=0)
        exists = key < end
        value = tl.load(place[:, None] + value_column[None, :], mask=exists[:, None] & in_value[None, :], other=0.0)
        score = tl.dot(query, tl.trans(value), input_precision=PRECISION) * scale_log2
        if REST > 0:
            rest = tl.load(place[:, None] + rest_column[None, :], mask=exists[:, None] & in_rest[None, :], other=0.0)
            score += tl.dot(query_rest, tl.trans(rest), input_precision=PRECISION) * scale_log2
        score = tl.where(key[None, :] < limit[:, None], score, -float("inf"))
        # Always true; see the same condition in sparse_mla_triton.py.
        if first < end:
            new_top = tl.maximum(top, tl.max(score, 1))
            shrink = tl.exp2(top - new_top)
            exact = tl.exp2(score - new_top[:, None])
            total = total * shrink + tl.sum(exact, 1)
            weight = exact.to(value.dtype)
            top = new_top
        acc = tl.dot(weight, value, acc * shrink[:, None], input_precision=PRECISION)

    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    keep = in_rows[:, None] & in_value[None, :]
    if partial < 0:
        out = out_ptr + (query_row + row)[:, None] * VALUE + value_column[None, :]
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=keep)
    else:
        slot = partial.to(tl.int64) * TILE_ROWS + row
        tl.store(partial_ptr + slot[:, None] * VALUE + value_column[None, :], result, mask=keep)
        tl.store(log_sum_ptr + slot, top + tl.log2(total), mask=in_rows)  # -inf if the row sees no key


@triton.jit(do_not_specialize=["splits_stride"])
def _combine(
    splits_ptr,
    partial_ptr,
    log_sum_ptr,
    out_ptr,
    splits_stride,
    HEADS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    split = splits_ptr + tl.program_id(0) // TILE_ROWS
    row = tl.program_id(0) % TILE_ROWS
    if row >= tl.load(split + splits_stride) * HEADS:
        return
    query_row = tl.load(split).to(tl.int64) * HEADS
    start = tl.load(split + 2 * splits_stride)
    end = tl.load(split + 3 * splits_stride)
    column = tl.arange(0, BLOCK_V)
    top = _LOWEST
    total = 0.0
    acc = tl.zeros([BLOCK_V], tl.float32)
    for first in range(start, end, BLOCK):
        part = first + tl.arange(0, BLOCK)
        slot = part.to(tl.int64) * TILE_ROWS + row
        log_sum = tl.load(log_sum_ptr + slot, mask=part < end, other=-float("inf"))
        inside = (part < end)[:, None] & (column < VALUE)[None, :]
        partial = tl.load(partial_ptr + slot[:, None] * VALUE + column[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(log_sum, 0))
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(log_sum - new_top)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(partial * weight[:, None], 0)
        top = new_top
    out = out_ptr + (query_row + row) * VALUE + column
    tl.store(out, (acc / tl.where(total > 0, total, 1.0)).to(out_ptr.dtype.element_ty), mask=column < VALUE)


@dataclass(frozen=True)
class _Tile:
    """Tile size and launch parameters of a program."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def _tile(rows: int, dtype: torch.dtype) -> _Tile:
    if dtype.itemsize > 2:
        return _Tile(16, 16, 4, 2)
    if rows <= 16:
        return _Tile(16, 64, 4, 3)
    if rows <= 32:
        return _Tile(32, 32, 4, 3)
    return _Tile(64, 64, 8, 2)


def launch_dense_mla(
    query: torch.Tensor,
    pages: torch.Tensor,
    plan: TilePlan,
    out: torch.Tensor,
    partial: torch.Tensor,
    log_sum: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Fill `out` [T, H, value_dim], except for split tiles, whose results go to `partial` and `log_sum`."""
    _, heads, dim = query.shape
    value_dim, tile_rows = out.shape[2], plan.tile_tokens * heads
    tile = _tile(tile_rows, query.dtype)
    _attend[(plan.pieces.shape[1] * triton.cdiv(tile_rows, tile.rows),)](
        query,
        pages,
        plan.pages,
        plan.pieces,
        out,
        partial,
        log_sum,
        plan.pieces.stride(0),
        *pages.stride()[:2],
        scale / math.log(2),
        HEADS=heads,
        TILE_ROWS=tile_rows,
        BLOCK_M=tile.rows,
        VALUE=value_dim,
        BLOCK_V=max(triton.next_power_of_2(value_dim), 16),
        REST=dim - value_dim,
        BLOCK_R=max(triton.next_power_of_2(dim - value_dim), 16),
        PAGE=plan.page_size,
        BLOCK=tile.keys,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",  # tf32 would round float32 to 10 bits
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **overlap_options(query.device),
    )


def launch_combine(plan: TilePlan, out: torch.Tensor, partial: torch.Tensor, log_sum: torch.Tensor) -> None:
    """Fill `out` for split tiles."""
    heads, value_dim = out.shape[1:]
    tile_rows = plan.tile_tokens * heads
    _combine[(plan.splits.shape[1] * tile_rows,)](
        plan.splits,
        partial,
        log_sum,
        out,
        plan.splits.stride(0),
        HEADS=heads,
        TILE_ROWS=tile_rows,
        VALUE=value_dim,
        BLOCK_V=max(triton.next_power_of_2(value_dim), 16),
        BLOCK=_COMBINED_AT_ONCE,
        num_warps=4,
        **overlap_options(out.device),
    )
