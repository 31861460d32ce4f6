"""Triton kernels of packed_rows.py: a program unpacks a few rows; `store_packed` is for kernels that write them."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803  (compile-time parameters are written in capitals)

import torch
import triton
import triton.language as tl

from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from .packed_format import GROUP, LARGEST, SMALLEST_SCALE

_ROWS_PER_PROGRAM = 8
_PROGRAMS_PER_SM = 8
"""Of those that unpack pages."""

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
def load_packed(place, exists, KV: tl.constexpr, BLOCK_KV: tl.constexpr, ROPE: tl.constexpr, BLOCK_ROPE: tl.constexpr):
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
def unpack_latent(fp8, scale):
    """float32, the shape of `fp8`, which `load_packed` has loaded."""
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
    fp8, scale, rest = load_packed(place, exists, KV, BLOCK_KV, ROPE, BLOCK_ROPE)
    column, turning = tl.arange(0, BLOCK_KV)[None, :], tl.arange(0, BLOCK_ROPE)[None, :]
    tl.store(out[:, None] + column, unpack_latent(fp8, scale).to(dtype), mask=exists[:, None] & (column < KV))
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
    row = tl.maximum(row, 0)
    place = pages_ptr + (row // PAGE).to(tl.int64) * page_stride + (row % PAGE).to(tl.int64) * slot_stride
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
    """Fill the first `count` pages of `out`. In a CUDA graph only the device knows how many those are, so that programs
    take one part after the other.
    """
    rope_dim = out.shape[2] - kv_rank
    sms = torch.cuda.get_device_properties(out.device).multi_processor_count if out.device.type == "cuda" else 1
    parts = out.shape[0] * triton.cdiv(out.shape[1], _ROWS_PER_PROGRAM)
    _unpack_pages[(min(parts, _PROGRAMS_PER_SM * sms),)](
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
