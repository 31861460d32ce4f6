"""Triton kernel of packed_attention.py: reads packed rows, without an unpacked copy in memory.

A program has a token, some of its heads, and a share of its rows. It loads a block of packed rows into registers while
it computes the block before, converts the latents to the dtype of the query, rounded as in mla/packed_rows_triton.py,
and multiplies them twice, as keys and as values. The rows are the left operand of both products, so that the heads are
the narrow side: tensor cores of Hopper multiply at least 64 rows, and a rank has as few as 16 heads.

Triton keeps a left operand in shared memory, once for both products, only if it is loaded or an argument of the loop:
hence a block is converted at the end of the iteration before its own.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803  (compile-time parameters are written in capitals)

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..backends.occupancy import multiprocessors
from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from ..mla.packed_format import GROUP
from ..mla.sparse_mla_triton import launch_combine, num_shares

_GROUP = tl.constexpr(GROUP)
_LOWEST = tl.constexpr(-1e30)
"""Below every score, but finite: the difference of two maxima over no rows is 0, not NaN."""


@triton.jit
def _load_rows(
    pages_ptr,
    row,
    page_stride,
    slot_stride,
    KV: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Latents in fp8 [BLOCK, BLOCK_KV], the scales of their groups, and rotated parts; zeros for rows below 0."""
    groups: tl.constexpr = (KV + _GROUP - 1) // _GROUP
    block_groups: tl.constexpr = (BLOCK_KV + _GROUP - 1) // _GROUP
    column = tl.arange(0, BLOCK_KV)[None, :]
    group = tl.arange(0, block_groups)[None, :]
    turning = tl.arange(0, BLOCK_ROPE)[None, :]
    exists = (row >= 0)[:, None]
    row = tl.maximum(row, 0)
    place = pages_ptr + (row // PAGE).to(tl.int64) * page_stride + (row % PAGE).to(tl.int64) * slot_stride
    packed = tl.load(place[:, None] + column, mask=exists & (column < KV), other=0)
    scales = (place + KV).to(tl.pointer_type(tl.float32))
    factor = tl.load(scales[:, None] + group, mask=exists & (group < groups), other=0.0)
    turned = (place + KV + 4 * groups).to(tl.pointer_type(tl.bfloat16))
    rope = tl.load(turned[:, None] + turning, mask=exists & (turning < ROPE), other=0.0)
    return packed, factor, rope


@triton.jit
def _converted(packed, factor, dtype: tl.constexpr):
    """Unpacked latents, rounded as in mla/packed_rows_triton.py."""
    groups: tl.constexpr = factor.shape[1]
    grouped = tl.reshape(packed, [packed.shape[0], groups, packed.shape[1] // groups])
    if dtype == tl.bfloat16:
        # four elements at a time: Triton would convert all of them before it multiplies one, in too many registers
        latent = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 both;
            .reg .f32 e, f, g, h;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 both, low;
            mov.b32 {a, b}, both;
            cvt.rn.f16x2.e4m3x2 both, high;
            mov.b32 {c, d}, both;
            cvt.f32.f16 e, a;
            cvt.f32.f16 f, b;
            cvt.f32.f16 g, c;
            cvt.f32.f16 h, d;
            mul.f32 e, e, $3;
            mul.f32 f, f, $4;
            mul.f32 g, g, $5;
            mul.f32 h, h, $6;
            cvt.rn.bf16x2.f32 $0, f, e;
            cvt.rn.bf16x2.f32 $1, h, g;
            }""",
            "=r,=r,r,f,f,f,f",
            [grouped, factor[:, :, None]],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        latent = (grouped.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor[:, :, None]).to(dtype)
    return tl.reshape(latent, [packed.shape[0], packed.shape[1]])


@triton.jit
def _attend_packed(
    query_ptr,
    packed_pages_ptr,
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
    KV: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
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
    dtype = query_ptr.dtype.element_ty
    token = (tl.program_id(0) // tiles).to(tl.int64)
    head = tl.program_id(0) % tiles * BLOCK_H + tl.arange(0, BLOCK_H)
    rows_ptr += token * rows_stride
    start = tl.program_id(1) * share
    everyone = start + tl.arange(0, BLOCK_SHARE)
    inside = (everyone < start + share) & (everyone < num_rows)
    chosen = tl.load(rows_ptr + everyone, mask=inside, other=-1)
    end = tl.max(tl.where(chosen >= 0, everyone + 1, start), 0)  # nothing is computed behind the last row

    column = tl.arange(0, BLOCK_KV)
    turning = tl.arange(0, BLOCK_ROPE)
    in_head = head < HEADS
    queries = query_ptr + token * query_stride + head[:, None] * head_stride
    query = tl.load(queries + column[None, :], mask=in_head[:, None] & (column < KV)[None, :], other=0.0)
    if ROPE > 0:
        query_rope = tl.load(
            queries + KV + turning[None, :], mask=in_head[:, None] & (turning < ROPE)[None, :], other=0.0
        )
    top = tl.full([BLOCK_H], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_KV, BLOCK_H], tl.float32)
    weight = tl.zeros([BLOCK, BLOCK_H], dtype)
    shrink = tl.zeros([BLOCK_H], tl.float32)
    within = tl.arange(0, BLOCK)
    number = start + within
    row = tl.load(rows_ptr + number, mask=number < end, other=-1)
    packed, factor, rope = _load_rows(
        packed_pages_ptr, row, page_stride, slot_stride, KV, BLOCK_KV, ROPE, BLOCK_ROPE, PAGE
    )
    latent = _converted(packed, factor, dtype)
    next_row = tl.load(rows_ptr + BLOCK + number, mask=BLOCK + number < end, other=-1)
    for first in range(start, end, BLOCK):
        packed, factor, next_rope = _load_rows(
            packed_pages_ptr, next_row, page_stride, slot_stride, KV, BLOCK_KV, ROPE, BLOCK_ROPE, PAGE
        )
        exists = row >= 0
        row = next_row
        number = first + 2 * BLOCK + within
        next_row = tl.load(rows_ptr + number, mask=number < end, other=-1)
        score = tl.dot(latent, tl.trans(query), input_precision=PRECISION) * scale_log2
        if ROPE > 0:
            score += tl.dot(rope.to(dtype), tl.trans(query_rope), input_precision=PRECISION) * scale_log2
        score = tl.where(exists[:, None], score, -float("inf"))
        # always true; mla/sparse_mla_triton.py says what it is for
        if first < end:
            new_top = tl.maximum(top, tl.max(score, 0))
            shrink = tl.exp2(top - new_top)
            exact = tl.exp2(score - new_top[None, :])
            total = total * shrink + tl.sum(exact, 0)
            weight = exact.to(dtype)
            top = new_top
        acc = tl.dot(tl.trans(latent), weight, acc * shrink[None, :], input_precision=PRECISION)
        latent = _converted(packed, factor, dtype)
        rope = next_rope

    result = acc / tl.where(total > 0, total, 1.0)[None, :]
    keep = (column < KV)[:, None] & in_head[None, :]
    if ALONE:
        out = out_ptr + (token * HEADS + head)[None, :] * KV + column[:, None]
        tl.store(out, result.to(dtype), mask=keep)
    else:
        slot = (token * tl.num_programs(1) + tl.program_id(1)) * HEADS + head
        tl.store(partial_ptr + slot[None, :] * KV + column[:, None], result, mask=keep)
        tl.store(log_sum_ptr + slot, top + tl.log2(total), mask=in_head)  # -inf if there was no row


@dataclass(frozen=True)
class PackedTile:
    """Tile size and launch parameters of a program."""

    heads: int
    rows: int
    num_warps: int
    programs: int
    """That run on a multiprocessor at a time."""

    @property
    def registers(self) -> int | None:
        """Most registers of a thread with which that many programs fit, if the compiler would use more."""
        return _REGISTERS // (32 * self.num_warps * self.programs) if self.programs > 1 else None


TILES: dict[int, PackedTile] = {
    16: PackedTile(16, 64, 8, 2),
    32: PackedTile(32, 64, 8, 1),
    64: PackedTile(64, 64, 8, 1),
}
"""By the number of heads, at most; of elements of 16 bits. Benchmarks replace them."""
_FLOAT_TILE = PackedTile(16, 16, 4, 1)
_REGISTERS = 65536
"""Of a multiprocessor."""


def _tile(heads: int, dtype: torch.dtype) -> PackedTile:
    if dtype.itemsize > 2:
        return _FLOAT_TILE
    return next((TILES[most] for most in TILES if heads <= most), TILES[64])


def launch_sparse_mla_packed(
    query: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, *, scale: float
) -> None:
    """Fill `out` [T, H, R]."""
    tokens, heads, dim = query.shape
    num_rows, kv_rank = rows.shape[1], out.shape[2]
    device = query.device
    tile = _tile(heads, query.dtype)
    tiles = tokens * triton.cdiv(heads, tile.heads)
    blocks = max(triton.cdiv(num_rows, tile.rows), 1)
    share = triton.cdiv(blocks, num_shares(tiles, blocks, multiprocessors(device) * tile.programs)) * tile.rows
    shares = max(triton.cdiv(num_rows, share), 1)
    partial = torch.empty(tokens, shares, heads, kv_rank, dtype=torch.float32, device=device) if shares > 1 else out
    log_sum = torch.empty(tokens, shares, heads, dtype=torch.float32, device=device) if shares > 1 else out
    _attend_packed[(tiles, shares)](
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
        KV=kv_rank,
        BLOCK_KV=max(triton.next_power_of_2(kv_rank), 16),
        ROPE=dim - kv_rank,
        BLOCK_ROPE=max(triton.next_power_of_2(dim - kv_rank), 16),
        PAGE=pages.shape[1],
        BLOCK=tile.rows,
        BLOCK_SHARE=triton.next_power_of_2(share),
        ALONE=shares == 1,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",  # tf32 would round float32 to 10 bits
        num_warps=tile.num_warps,
        num_stages=1,  # the kernel itself loads rows ahead
        maxnreg=tile.registers,
        **overlap_options(device),
    )
    if shares > 1:
        launch_combine(partial, log_sum, out)
