"""Triton kernels of sparse_mla.py.

A program processes up to 64 heads of one token and a share of its selected rows. The heads are the rows of the matrix
products, so a cache row is read once for all of them; with 128 heads, the second program reads it from the L2 cache. A
row's first `value_dim` elements are loaded once and used twice, as key and as value. With several shares (split-K),
each program stores a partial result and its log-sum, and `_combine` combines them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ...common.arithmetic import ceil_div
from ..backends.occupancy import multiprocessors
from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous

_COMBINED_AT_ONCE = 8

LOWEST = tl.constexpr(-1e30)
"""Below every score, but finite: the difference of two maxima over no rows is 0, not NaN."""


@triton.jit
def _attend(
    query_ptr,
    pages_ptr,
    rows_ptr,
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    query_stride,
    head_stride,
    rows_stride,
    page_stride,
    slot_stride,
    num_rows,
    share,
    scale_log2,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SHARE: tl.constexpr,
    ALONE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    tiles: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // tiles).to(tl.int64)
    head = tl.program_id(0) % tiles * BLOCK_H + tl.arange(0, BLOCK_H)
    rows_ptr += token * rows_stride
    start = tl.program_id(1) * share
    everyone = start + tl.arange(0, BLOCK_SHARE)
    inside = (everyone < start + share) & (everyone < num_rows)
    chosen = tl.load(rows_ptr + everyone, mask=inside, other=-1)
    end = tl.max(tl.where(chosen >= 0, everyone + 1, start), 0)  # nothing is computed after the last row

    value_column = tl.arange(0, BLOCK_V)
    rest_column = VALUE + tl.arange(0, BLOCK_R)
    in_value = value_column < VALUE
    in_rest = rest_column < VALUE + REST
    in_head = head < HEADS
    query_ptr += token * query_stride
    query = tl.load(
        query_ptr + head[:, None] * head_stride + value_column[None, :],
        mask=in_head[:, None] & in_value[None, :],
        other=0.0,
    )
    if REST > 0:
        query_rest = tl.load(
            query_ptr + head[:, None] * head_stride + rest_column[None, :],
            mask=in_head[:, None] & in_rest[None, :],
            other=0.0,
        )
    top = tl.full([BLOCK_H], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    weight = tl.zeros([BLOCK_H, BLOCK], query.dtype)
    shrink = tl.zeros([BLOCK_H], tl.float32)
    number = start + tl.arange(0, BLOCK)
    next_row = tl.load(rows_ptr + number, mask=number < end, other=-1)
    for first in range(start, end, BLOCK):
        # loaded one iteration ahead, outside Triton's pipelined loads, which would need another buffer for it
        row = next_row
        number += BLOCK
        next_row = tl.load(rows_ptr + number, mask=number < end, other=-1)
        exists = row >= 0
        row = tl.maximum(row, 0)
        place = pages_ptr + (row // PAGE).to(tl.int64) * page_stride + (row % PAGE).to(tl.int64) * slot_stride
        value = tl.load(place[:, None] + value_column[None, :], mask=exists[:, None] & in_value[None, :], other=0.0)
        score = tl.dot(query, tl.trans(value), input_precision=PRECISION) * scale_log2
        if REST > 0:
            rest = tl.load(place[:, None] + rest_column[None, :], mask=exists[:, None] & in_rest[None, :], other=0.0)
            score += tl.dot(query_rest, tl.trans(rest), input_precision=PRECISION) * scale_log2
        score = tl.where(exists[None, :], score, -float("inf"))
        # Always true. Without the condition, Triton would see that the scores are the input of another product, and
        # make every warpgroup compute all of them. For the same reason, scores are scaled before they are added.
        if first < end:
            new_top = tl.maximum(top, tl.max(score, 1))
            shrink = tl.exp2(top - new_top)
            exact = tl.exp2(score - new_top[:, None])
            total = total * shrink + tl.sum(exact, 1)
            weight = exact.to(value.dtype)
            top = new_top
        acc = tl.dot(weight, value, acc * shrink[:, None], input_precision=PRECISION)

    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    keep = in_head[:, None] & in_value[None, :]
    if ALONE:
        out = out_ptr + (token * HEADS + head)[:, None] * VALUE + value_column[None, :]
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=keep)
    else:
        slot = (token * tl.num_programs(1) + tl.program_id(1)) * HEADS + head
        tl.store(partial_ptr + slot[:, None] * VALUE + value_column[None, :], result, mask=keep)
        tl.store(log_sum_ptr + slot, top + tl.log2(total), mask=in_head)  # -inf if there was no row


@triton.jit
def _combine(
    partial_ptr,
    log_sum_ptr,
    out_ptr,
    shares,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    token = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    column = tl.arange(0, BLOCK_V)
    top = LOWEST
    total = 0.0
    acc = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, shares, BLOCK):
        share = first + tl.arange(0, BLOCK)
        slot = (token * shares + share) * HEADS + head
        log_sum = tl.load(log_sum_ptr + slot, mask=share < shares, other=-float("inf"))
        inside = (share < shares)[:, None] & (column < VALUE)[None, :]
        partial = tl.load(partial_ptr + slot[:, None] * VALUE + column[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(log_sum, 0))
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(log_sum - new_top)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(partial * weight[:, None], 0)
        top = new_top
    out = out_ptr + (token * HEADS + head) * VALUE + column
    tl.store(out, (acc / tl.where(total > 0, total, 1.0)).to(out_ptr.dtype.element_ty), mask=column < VALUE)


@dataclass(frozen=True)
class Tile:
    """Tile size and launch parameters of a program."""

    heads: int
    rows: int
    num_warps: int
    num_stages: int


RANK_TILE = Tile(heads=16, rows=32, num_warps=4, num_stages=3)
"""For up to 16 heads, as on one of many ranks."""


def _tile(heads: int, dtype: torch.dtype) -> Tile:
    if dtype.itemsize > 2:
        return Tile(16, 16, 4, 2)
    if heads <= 16:
        return RANK_TILE
    if heads <= 32:
        return Tile(32, 32, 4, 3)
    return Tile(64, 64, 8, 2)


@functools.cache
def num_shares(tiles: int, blocks: int, sms: int) -> int:
    """Shares to split the `blocks` of rows of each of `tiles` (a token, some heads) into; one program per SM."""

    def duration(shares: int) -> float:  # in units of blocks, with the overhead of a program and a partial result
        return ceil_div(tiles * shares, sms) * (ceil_div(blocks, shares) + 2) + (shares > 1) * 2 + shares / 20

    return min(range(1, blocks + 1), key=duration)


def launch_sparse_mla(
    query: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, *, scale: float
) -> None:
    """Fill `out` [T, H, value_dim]."""
    launch_attention(_attend, _tile(query.shape[1], query.dtype), query, pages, rows, out, scale=scale)


def launch_attention(
    kernel: Any,
    tile: Tile,
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Launch `_attend`, or a kernel with the same parameters, and `_combine` if there are several shares."""
    tokens, heads, dim = query.shape
    num_rows, value_dim = rows.shape[1], out.shape[2]
    device = query.device
    tiles = tokens * triton.cdiv(heads, tile.heads)
    blocks = max(triton.cdiv(num_rows, tile.rows), 1)
    share = triton.cdiv(blocks, num_shares(tiles, blocks, multiprocessors(device))) * tile.rows
    shares = max(triton.cdiv(num_rows, share), 1)
    block_v = max(triton.next_power_of_2(value_dim), 16)
    partial = torch.empty(tokens, shares, heads, value_dim, dtype=torch.float32, device=device) if shares > 1 else out
    log_sum = torch.empty(tokens, shares, heads, dtype=torch.float32, device=device) if shares > 1 else out
    kernel[(tiles, shares)](
        query,
        pages,
        rows,
        out,
        partial,
        log_sum,
        *query.stride()[:2],
        rows.stride(0),
        *pages.stride()[:2],
        num_rows,
        share,
        scale / math.log(2),
        HEADS=heads,
        BLOCK_H=tile.heads,
        VALUE=value_dim,
        BLOCK_V=block_v,
        REST=dim - value_dim,
        BLOCK_R=max(triton.next_power_of_2(dim - value_dim), 16),
        PAGE=pages.shape[1],
        BLOCK=tile.rows,
        BLOCK_SHARE=triton.next_power_of_2(share),
        ALONE=shares == 1,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",  # tf32 would round float32 to 10 bits
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **overlap_options(device),
    )
    if shares > 1:
        launch_combine(partial, log_sum, out)


def launch_combine(partial: torch.Tensor, log_sum: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` [T, H, value_dim] from the results of shares [T, shares, H, value_dim], and the binary logarithms of
    their sums of weights [T, shares, H].
    """
    tokens, heads, value_dim = out.shape
    _combine[(tokens * heads,)](
        partial,
        log_sum,
        out,
        partial.shape[1],
        HEADS=heads,
        VALUE=value_dim,
        BLOCK_V=max(triton.next_power_of_2(value_dim), 16),
        BLOCK=_COMBINED_AT_ONCE,
        num_warps=4,
        **overlap_options(out.device),
    )
