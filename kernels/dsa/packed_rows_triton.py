"""Triton kernels of packed_rows.py. `store_packed` is for kernels that write packed rows.

To unpack rows, a program copies a few of them. To attend to packed rows, programs divide the work as in
sparse_mla_triton.py. While a program multiplies a block of rows, it loads the next block, still packed, into registers,
and the row numbers of the block after that. Triton does not pipeline these loads by itself, because what they load is
converted before it is multiplied.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ..backends.occupancy import multiprocessors
from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from .packed_format import GROUP, LARGEST, SMALLEST_SCALE
from .sparse_mla_triton import LOWEST, Tile, launch_attention

_ROWS_PER_PROGRAM = 8
_PROGRAMS_PER_SM = 8
"""Programs per SM that unpack pages."""
FUSED_TILE = Tile(heads=16, rows=64, num_warps=8, num_stages=1)
_FUSED_TILE_OF_FLOAT32 = Tile(heads=16, rows=16, num_warps=4, num_stages=1)

_GROUP = tl.constexpr(GROUP)
_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def store_packed(place, latent, rotated1, rotated2, pair, KV: tl.constexpr, BLOCK_KV: tl.constexpr, HALF: tl.constexpr):
    """Pack one row at `place`: latent [BLOCK_KV], zero from KV on, and the halves of the rotated part [BLOCK_HALF]."""
    groups: tl.constexpr = (KV + _GROUP - 1) // _GROUP
    blocks: tl.constexpr = (BLOCK_KV + _GROUP - 1) // _GROUP
    values = tl.reshape(latent.to(tl.float32), [blocks, BLOCK_KV // blocks])
    scale = tl.maximum(tl.max(tl.abs(values), 1) / _LARGEST, _SMALLEST_SCALE)
    fp8 = (values / scale[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    column = tl.arange(0, BLOCK_KV)
    tl.store(place + column, tl.reshape(fp8, [BLOCK_KV]), mask=column < KV)
    group = tl.arange(0, blocks)
    tl.store((place + KV).to(tl.pointer_type(tl.float32)) + group, scale, mask=group < groups)
    turned = (place + KV + 4 * groups).to(tl.pointer_type(tl.bfloat16))
    tl.store(turned + pair, rotated1.to(tl.bfloat16), mask=pair < HALF)
    tl.store(turned + HALF + pair, rotated2.to(tl.bfloat16), mask=pair < HALF)


@triton.jit
def _places(pages_ptr, row, page_stride, slot_stride, PAGE: tl.constexpr):
    """Pointers to these rows; to row 0 for rows that do not exist, so that every address is valid."""
    row = tl.maximum(row, 0)
    return pages_ptr + (row // PAGE).to(tl.int64) * page_stride + (row % PAGE).to(tl.int64) * slot_stride


@triton.jit
def _load_packed(place, exists, KV: tl.constexpr, BLOCK_KV: tl.constexpr, ROPE: tl.constexpr, BLOCK_ROPE: tl.constexpr):
    """The packed rows at `place` [N] that exist, zeros for others: the latent [N, BLOCK_KV], fp8 as uint8, its scales
    [N, groups of BLOCK_KV], each loaded once, and the rotated part [N, BLOCK_ROPE].
    """
    groups: tl.constexpr = (KV + _GROUP - 1) // _GROUP
    blocks: tl.constexpr = (BLOCK_KV + _GROUP - 1) // _GROUP
    group, column, turning = tl.arange(0, blocks)[None, :], tl.arange(0, BLOCK_KV)[None, :], tl.arange(0, BLOCK_ROPE)
    fp8 = tl.load(place[:, None] + column, mask=exists[:, None] & (column < KV), other=0)
    scales = (place + KV).to(tl.pointer_type(tl.float32))
    scale = tl.load(scales[:, None] + group, mask=exists[:, None] & (group < groups), other=0.0)
    turned = (place + KV + 4 * groups).to(tl.pointer_type(tl.bfloat16))
    rest = tl.load(turned[:, None] + turning[None, :], mask=exists[:, None] & (turning < ROPE)[None, :], other=0.0)
    return fp8, scale, rest


@triton.jit
def _unpack_latent(fp8, scale):
    """float32, the shape of `fp8`, which `_load_packed` has loaded."""
    rows: tl.constexpr = scale.shape[0]
    groups: tl.constexpr = scale.shape[1]
    width: tl.constexpr = fp8.shape[1] // groups
    grouped = tl.reshape(fp8.to(tl.float8e4nv, bitcast=True).to(tl.float32), [rows, groups, width])
    return tl.reshape(grouped * scale[:, :, None], [rows, groups * width])


@triton.jit
def _copy_unpacked(
    place, exists, out, KV: tl.constexpr, BLOCK_KV: tl.constexpr, ROPE: tl.constexpr, BLOCK_ROPE: tl.constexpr
):
    """Unpack the rows at `place` [N] that exist to `out` [N]."""
    dtype = out.dtype.element_ty
    fp8, scale, rest = _load_packed(place, exists, KV, BLOCK_KV, ROPE, BLOCK_ROPE)
    column, turning = tl.arange(0, BLOCK_KV)[None, :], tl.arange(0, BLOCK_ROPE)[None, :]
    tl.store(out[:, None] + column, _unpack_latent(fp8, scale).to(dtype), mask=exists[:, None] & (column < KV))
    tl.store(out[:, None] + KV + turning, rest.to(dtype), mask=exists[:, None] & (turning < ROPE))


@triton.jit
def _unpack_rows(
    pages_ptr,
    rows_ptr,
    out_ptr,
    places_ptr,
    num_rows,
    k,
    rows_stride,
    page_stride,
    slot_stride,
    KV: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows_ptr + (number // k).to(tl.int64) * rows_stride + number % k, mask=number < num_rows, other=-1)
    exists = row >= 0
    tl.store(places_ptr + number, tl.where(exists, number, -1), mask=number < num_rows)
    place = _places(pages_ptr, row, page_stride, slot_stride, PAGE)
    _copy_unpacked(place, exists, out_ptr + number.to(tl.int64) * (KV + ROPE), KV, BLOCK_KV, ROPE, BLOCK_ROPE)


@triton.jit
def _unpack_pages(
    pages_ptr,
    sources_ptr,
    count_ptr,
    out_ptr,
    page_stride,
    slot_stride,
    KV: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    parts: tl.constexpr = (PAGE + ROWS - 1) // ROWS
    for part in range(tl.program_id(0), tl.load(count_ptr) * parts, tl.num_programs(0)):
        number = part // parts
        slot = part % parts * ROWS + tl.arange(0, ROWS)
        page = pages_ptr + tl.load(sources_ptr + number).to(tl.int64) * page_stride
        out = out_ptr + (number * PAGE + slot).to(tl.int64) * (KV + ROPE)
        _copy_unpacked(page + slot.to(tl.int64) * slot_stride, slot < PAGE, out, KV, BLOCK_KV, ROPE, BLOCK_ROPE)


def launch_unpack_rows(
    pages: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, places: torch.Tensor, kv_rank: int
) -> None:
    """Fill the requested rows of `out`, and `places`."""
    rope_dim = out.shape[2] - kv_rank
    _unpack_rows[(triton.cdiv(rows.numel(), _ROWS_PER_PROGRAM),)](
        pages,
        rows,
        out,
        places,
        rows.numel(),
        rows.shape[1],
        rows.stride(0),
        *pages.stride()[:2],
        KV=kv_rank,
        BLOCK_KV=triton.next_power_of_2(kv_rank),
        ROPE=rope_dim,
        BLOCK_ROPE=triton.next_power_of_2(rope_dim),
        PAGE=pages.shape[1],
        ROWS=_ROWS_PER_PROGRAM,
        num_warps=4,
        **overlap_options(pages.device),
    )


def launch_unpack_pages(
    pages: torch.Tensor, sources: torch.Tensor, count: torch.Tensor, out: torch.Tensor, kv_rank: int
) -> None:
    """Fill the first `count` pages of `out`. In a CUDA graph only the device knows `count`, so each program loops over
    parts of the pages.
    """
    rope_dim = out.shape[2] - kv_rank
    parts = out.shape[0] * triton.cdiv(out.shape[1], _ROWS_PER_PROGRAM)
    _unpack_pages[(min(parts, _PROGRAMS_PER_SM * multiprocessors(out.device)),)](
        pages,
        sources,
        count,
        out,
        *pages.stride()[:2],
        KV=kv_rank,
        BLOCK_KV=triton.next_power_of_2(kv_rank),
        ROPE=rope_dim,
        BLOCK_ROPE=triton.next_power_of_2(rope_dim),
        PAGE=pages.shape[1],
        ROWS=_ROWS_PER_PROGRAM,
        num_warps=4,
        **overlap_options(pages.device),
    )


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
    end = tl.max(tl.where(chosen >= 0, everyone + 1, start), 0)  # nothing is computed after the last row

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
    # all loads ahead are masked: there is nothing to read after the last row
    row = tl.load(rows_ptr + number, mask=number < end, other=-1)
    place = _places(pages_ptr, row, page_stride, slot_stride, PAGE)
    fp8, scale, rest = _load_packed(place, row >= 0, VALUE, BLOCK_V, REST, BLOCK_R)
    number += BLOCK
    next_row = tl.load(rows_ptr + number, mask=number < end, other=-1)
    for _ in range(start, end, BLOCK):
        exists = row >= 0
        value = _unpack_latent(fp8, scale).to(query.dtype)
        turned = rest.to(query.dtype)
        row = next_row
        place = _places(pages_ptr, row, page_stride, slot_stride, PAGE)
        fp8, scale, rest = _load_packed(place, row >= 0, VALUE, BLOCK_V, REST, BLOCK_R)
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
    tile = _FUSED_TILE_OF_FLOAT32 if query.dtype.itemsize > 2 else FUSED_TILE
    launch_attention(_attend_packed, tile, query, pages, rows, out, scale=scale)
