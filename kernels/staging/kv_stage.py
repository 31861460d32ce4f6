"""Gathers tokens of a KV pool's pages into one contiguous block, and scatters such a block: a head slice is gathered,
sent in one write and scattered into the pages of another pool, which may have another page size.

    block[l, p, h, t]  =  pool[pages[u // S], layers[l], p, heads[h], u % S]    with u = start + t, t < end - start

kv_gather assigns to the left, kv_scatter to the right; bytes are copied uninterpreted. Shapes: pool
[page, layer, plane, head, S, dim], the last dimension contiguous, otherwise any strides; pages [at least ceil(end / S)]
int32 or int64, the pages of one sequence from its token 0 on (or of its tail, with start and end counted from there);
block uint8, one dimension, contiguous, exactly `block_bytes` long. Layers and heads are local to the pool.

The order in the block, `[layer][plane][head][token][dim]`, is independent of page sizes, so both sides only have to
agree on the ranges. Planes with rows of different sizes are separate calls, each with a view of one plane.

Accesses are 16 bytes wide if row size, strides and addresses allow it, else the widest word that fits. Scattering to a
page twice in one call, or to a page with another writer, is undefined. The work is enqueued on the current stream.
Lower bound: 2 * block_bytes moved.
"""

from collections.abc import Iterator

import torch

from ...common.arithmetic import ceil_div
from ..backends.dispatch import Impl, use_triton

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def block_bytes(pool: torch.Tensor, *, tokens: int, layers: int, heads: int) -> int:
    """Bytes of a block with this many tokens, layers and heads of a pool."""
    _, _, planes, _, _, dim = pool.shape
    return layers * planes * heads * tokens * dim * pool.element_size()


def kv_gather(
    pool: torch.Tensor,
    pages: torch.Tensor,
    block: torch.Tensor,
    *,
    start: int,
    end: int,
    layers: range,
    heads: range,
    impl: Impl = "auto",
) -> None:
    """Fill `block` with tokens [start, end) of these pages; see the module docstring."""
    _copy(pool, pages, block, start, end, layers, heads, impl, gather=True)


def kv_scatter(
    block: torch.Tensor,
    pool: torch.Tensor,
    pages: torch.Tensor,
    *,
    start: int,
    end: int,
    layers: range,
    heads: range,
    impl: Impl = "auto",
) -> None:
    """Write `block` to tokens [start, end) of these pages and nothing else; see the module docstring."""
    _copy(pool, pages, block, start, end, layers, heads, impl, gather=False)


def warm_up_kv_stage(pool: torch.Tensor) -> None:
    """Compile the kernels of kv_gather and kv_scatter for this pool, for blocks of any size: seconds that the first
    call would otherwise take. No effect on a CPU. Copies a token onto itself: page 0 must have no other writer.
    """
    if not use_triton("auto", pool.device):
        return
    pages = torch.zeros(1, dtype=torch.int32, device=pool.device)
    size = block_bytes(pool, tokens=1, layers=1, heads=1)
    block = torch.empty(size, dtype=torch.uint8, device=pool.device)
    kv_gather(pool, pages, block, start=0, end=1, layers=range(1), heads=range(1))
    kv_scatter(block, pool, pages, start=0, end=1, layers=range(1), heads=range(1))


def _copy(
    pool: torch.Tensor,
    pages: torch.Tensor,
    block: torch.Tensor,
    start: int,
    end: int,
    layers: range,
    heads: range,
    impl: Impl,
    *,
    gather: bool,
) -> None:
    _check(pool, pages, block, start, end, layers, heads)
    pool, block = _as_words(pool, block)
    if not use_triton(impl, pool.device):
        for slots, rows in _pieces(pool, pages, block, start, end, layers, heads):
            target, source = (rows, slots) if gather else (slots, rows)
            target.copy_(source)
    elif block.numel():
        from .kv_stage_triton import launch_kv_stage

        launch_kv_stage(pool, pages, block, start, end, layers, heads, gather=gather)


def _pieces(
    pool: torch.Tensor, pages: torch.Tensor, block: torch.Tensor, start: int, end: int, layers: range, heads: range
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Per page, the same tokens in the pool and in the block: two views `[layer, plane, head, token, word]`."""
    size, width = pool.shape[4:]
    rows = block.view(len(layers), pool.shape[2], len(heads), end - start, width)
    part = pool[:, layers.start : layers.stop, :, heads.start : heads.stop]
    first = start // size
    for index, page in enumerate(pages[first : ceil_div(end, size)].tolist(), first):
        begin, stop = max(start, index * size), min(end, (index + 1) * size)
        slots = part[page, :, :, :, begin - index * size : stop - index * size]
        yield slots, rows[:, :, :, begin - start : stop - start]


def _as_words(pool: torch.Tensor, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both, viewed as the widest integers that divide their addresses, strides and row size."""
    row = pool.view(torch.uint8)
    spans = (row.shape[-1], row.data_ptr(), block.data_ptr(), row.storage_offset(), block.storage_offset())
    for word in WORDS:
        if not any(span % word.itemsize for span in (*spans, *row.stride()[:-1])):
            return row.view(word), block.view(word)
    raise AssertionError("every number is a multiple of one byte")


def _check(
    pool: torch.Tensor, pages: torch.Tensor, block: torch.Tensor, start: int, end: int, layers: range, heads: range
) -> None:
    if pool.ndim != 6 or pool.stride(-1) != 1:
        raise ValueError(f"pool {list(pool.shape)} with strides {pool.stride()}: six dimensions, the last contiguous")
    _, num_layers, _, num_heads, size, _ = pool.shape
    for name, part, limit in (("layers", layers, num_layers), ("heads", heads, num_heads)):
        if part.step != 1 or not 0 <= part.start <= part.stop <= limit:
            raise ValueError(f"{name} {part} are not a range within [0, {limit})")
    if not 0 <= start <= end or pages.ndim != 1 or len(pages) < ceil_div(end, size):
        raise ValueError(f"tokens [{start}, {end}) are not in {list(pages.shape)} pages of {size} tokens")
    if pages.dtype not in (torch.int32, torch.int64) or not pages.is_contiguous():
        raise ValueError(f"pages must be contiguous int32 or int64, got {pages.dtype} with stride {pages.stride()}")
    needed = block_bytes(pool, tokens=end - start, layers=len(layers), heads=len(heads))
    if block.dtype != torch.uint8 or block.shape != (needed,) or not block.is_contiguous():
        raise ValueError(
            f"these tokens, layers and heads need a contiguous uint8 block of {needed} bytes, got {block.dtype} "
            f"{list(block.shape)}"
        )
    if not pool.device == pages.device == block.device:
        raise ValueError(f"pool is on {pool.device}, pages on {pages.device}, block on {block.device}")
