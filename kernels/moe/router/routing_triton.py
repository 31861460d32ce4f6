"""Triton kernels of routing.py. A program sorts a chunk of the numbers. With several chunks, a first kernel counts the
numbers of each expert in each chunk, so that the second kernel can place them without waiting for other programs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ...backends.overlap_triton import overlap_options, start_next, wait_for_previous
from ...linear.row_tiles import RowTiles

_CHUNK = 256


@triton.jit
def _local_experts(experts_ptr, number, numbers, first, count):
    """The experts of some numbers, counted from this rank's first expert; `count` for experts of other ranks."""
    expert = tl.load(experts_ptr + number, mask=number < numbers, other=-1).to(tl.int32) - first
    return tl.where((number < numbers) & (expert >= 0) & (expert < count), expert, count)


@triton.jit(do_not_specialize=["numbers", "first"])
def _count(
    experts_ptr,
    counts_ptr,
    numbers,
    first,
    count,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    number = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    sizes = tl.histogram(_local_experts(experts_ptr, number, numbers, first, count), BINS)
    tl.store(counts_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), sizes)


@triton.jit(do_not_specialize=["numbers", "first", "chunks", "tiles"])
def _place(
    experts_ptr,
    counts_ptr,
    starts_ptr,
    order_ptr,
    place_ptr,
    ends_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    tile_counts_ptr,
    numbers,
    first,
    count,
    chunks,
    tiles,
    TILE_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BINS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    chunk = tl.program_id(0)
    index = tl.arange(0, CHUNK)
    number = chunk * CHUNK + index
    expert = _local_experts(experts_ptr, number, numbers, first, count)
    bins = tl.arange(0, BINS)
    if CHUNKS == 1:
        sizes = tl.histogram(expert, BINS)
        before = tl.zeros([BINS], tl.int32)
    else:
        sizes = tl.zeros([BINS], tl.int32)
        before = tl.zeros([BINS], tl.int32)
        for begin in range(0, chunks, 32):
            other = (begin + tl.arange(0, 32))[:, None]
            counted = tl.load(counts_ptr + other * BINS + bins[None, :], mask=other < chunks, other=0)
            sizes += tl.sum(counted, 0)
            before += tl.sum(tl.where(other < chunk, counted, 0), 0)
    sizes = tl.where(bins < count, sizes, 0)
    ends = tl.cumsum(sizes, 0)
    # where this chunk's part of each expert begins; stored to memory, because a program cannot index its registers
    starts_ptr += chunk * BINS
    tl.store(starts_ptr + bins, ends - sizes + before)
    tl.debug_barrier()
    start = tl.load(starts_ptr + expert, mask=expert < count, other=0)
    rank = tl.zeros([CHUNK], tl.int32)
    # counts equal experts before each number of the chunk; unrolled, so that the loads do not wait for one another
    for begin in tl.static_range(0, CHUNK, 32):
        at = begin + tl.arange(0, 32)
        other = _local_experts(experts_ptr, chunk * CHUNK + at, numbers, first, count)
        rank += tl.sum(((other[None, :] == expert[:, None]) & (at[None, :] < index[:, None])).to(tl.int32), 1)
    tl.store(order_ptr + start + rank, number, mask=expert < count)
    tl.store(place_ptr + number, start + rank, mask=expert < count)
    if chunk == 0:
        tl.store(ends_ptr + bins, ends, mask=bins < count)
        of_expert = (sizes + TILE_ROWS - 1) // TILE_ROWS
        tile = tl.cumsum(of_expert, 0) - of_expert
        for step in range(tl.max(of_expert, 0)):
            here = step < of_expert
            tl.store(tile_expert_ptr + tile + step, bins, mask=here)
            tl.store(tile_first_ptr + tile + step, ends - sizes + step * TILE_ROWS, mask=here)
        used = tl.sum(of_expert, 0)
        tl.store(tile_counts_ptr + bins, tl.where(bins == 0, used, 0), mask=bins < 3)
        for unused in range(used, tiles, BINS):
            tl.store(tile_expert_ptr + unused + bins, -1, mask=unused + bins < tiles)


def launch_route(experts: torch.Tensor, first: int, count: int, routing: RowTiles) -> None:
    """Fill the tensors of `routing`."""
    numbers = experts.numel()
    chunk = min(_CHUNK, max(64, triton.next_power_of_2(numbers)))
    chunks, bins = triton.cdiv(numbers, chunk), max(4, triton.next_power_of_2(count + 1))
    counts, starts = torch.empty(2, chunks, bins, dtype=torch.int32, device=experts.device)
    options = overlap_options(experts.device)
    if chunks > 1:
        _count[(chunks,)](experts, counts, numbers, first, count, CHUNK=chunk, BINS=bins, num_warps=4, **options)
    _place[(chunks,)](
        experts,
        counts,
        starts,
        routing.order,
        routing.place,
        routing.ends,
        routing.expert,
        routing.first,
        routing.counts,
        numbers,
        first,
        count,
        chunks,
        len(routing.expert),
        TILE_ROWS=routing.rows,
        CHUNK=chunk,
        CHUNKS=min(chunks, 2),
        BINS=bins,
        num_warps=8,
        **options,
    )
