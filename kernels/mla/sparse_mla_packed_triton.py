"""Triton kernel of sparse_mla_packed: attention that unpacks rows in registers, for few heads.

Programs are as in sparse_mla_triton.py. While a block of rows is multiplied, the next one is loaded into registers,
packed, and the row numbers of the one after that. Triton would not pipeline such loads by itself, because what they
load is converted before it is multiplied.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803  (compile-time parameters are written in capitals)

import torch
import triton
import triton.language as tl

from ..backends.overlap_triton import start_next, wait_for_previous
from .packed_rows_triton import load_packed, unpack_latent
from .sparse_mla_triton import LOWEST, Tile, launch_attention

TILE = Tile(heads=16, rows=64, num_warps=8, num_stages=1)
_FLOAT32_TILE = Tile(heads=16, rows=16, num_warps=4, num_stages=1)


@triton.jit
def _places(pages_ptr, row, page_stride, slot_stride, PAGE: tl.constexpr):
    """Pointers to these rows; to row 0 for rows that do not exist, so that every address is valid."""
    row = tl.maximum(row, 0)
    return pages_ptr + (row // PAGE).to(tl.int64) * page_stride + (row % PAGE).to(tl.int64) * slot_stride


@triton.jit
def _attend_packed(
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
    end = tl.max(tl.where(chosen >= 0, everyone + 1, start), 0)  # nothing is computed behind the last row

    value_column = tl.arange(0, BLOCK_V)
    rest_column = tl.arange(0, BLOCK_R)
    keep = (head < HEADS)[:, None] & (value_column < VALUE)[None, :]
    query_ptr += token * query_stride
    own = query_ptr + head[:, None] * head_stride
    query = tl.load(own + value_column[None, :], mask=keep, other=0.0)
    rest_mask = (head < HEADS)[:, None] & (rest_column < REST)[None, :]
    query_rest = tl.load(own + VALUE + rest_column[None, :], mask=rest_mask, other=0.0)

    top = tl.full([BLOCK_H], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    number = start + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + number, mask=number < end, other=-1)
    place = _places(pages_ptr, row, page_stride, slot_stride, PAGE)
    fp8, scale, rest = load_packed(place, row >= 0, VALUE, BLOCK_V, REST, BLOCK_R)
    number += BLOCK
    next_row = tl.load(rows_ptr + number, mask=number < end, other=-1)
    for _ in range(start, end, BLOCK):
        exists = row >= 0
        value = unpack_latent(fp8, scale).to(query.dtype)
        turned = rest.to(query.dtype)
        row = next_row
        place = _places(pages_ptr, row, page_stride, slot_stride, PAGE)
        fp8, scale, rest = load_packed(place, row >= 0, VALUE, BLOCK_V, REST, BLOCK_R)
        number += BLOCK
        next_row = tl.load(rows_ptr + number, mask=number < end, other=-1)

        score = tl.dot(query, tl.trans(value), input_precision=PRECISION)
        score = tl.dot(query_rest, tl.trans(turned), score, input_precision=PRECISION) * scale_log2
        score = tl.where(exists[None, :], score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new_top)
        exact = tl.exp2(score - new_top[:, None])
        total = total * shrink + tl.sum(exact, 1)
        acc = tl.dot(exact.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top

    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    if ALONE:
        out = out_ptr + (token * HEADS + head)[:, None] * VALUE + value_column[None, :]
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=keep)
    else:
        slot = (token * tl.num_programs(1) + tl.program_id(1)) * HEADS + head
        tl.store(partial_ptr + slot[:, None] * VALUE + value_column[None, :], result, mask=keep)
        tl.store(log_sum_ptr + slot, top + tl.log2(total), mask=head < HEADS)  # -inf if there was no row


def launch_sparse_mla_packed(
    query: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, *, scale: float
) -> None:
    """Fill `out` [T, H, value_dim] from packed `pages`."""
    tile = _FLOAT32_TILE if query.dtype.itemsize > 2 else TILE
    launch_attention(_attend_packed, tile, query, pages, rows, out, scale=scale)
