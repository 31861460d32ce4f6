"""Latent rows in about half the memory: the latent in fp8 with a scale per 128 elements, the rotated part in bf16.

    packed   =  [fp8(c / s), s, k]                          with  c, k = a row's first R and last P elements
    s        =  max |c| / 448  over each 128 elements       448 is the largest e4m3 number
    unpacked =  [fp8 * s, k]

In bytes: R of fp8 (e4m3), 4 for the float32 scale of every started 128 elements, 2 * P of bfloat16: 656 for R = 512 and
P = 64, instead of 1152. Packed pages are uint8 [pages, page_size, bytes], rows contiguous, otherwise any strides.

    unpack_rows(pages, rows)             =  the unpacked rows[t, j], for the j with rows[t, j] >= 0
    unpack_pages(pages, sources, count)  =  the unpacked pages[sources[i]], for i < count

Shapes: rows [T, K] int32: page * page_size + slot, -1 for none; unpacked [T * K, 1, R + P], and the index of each row
in it, [T, K] int32, -1 for none: pages and rows as sparse_mla.py takes them. sources [N] and count [1] int32; unpacked
[N, page_size, R + P]. Other elements are left uninitialised.

There are two ways to attend to packed pages. If several queries share their rows, as in a chunk of a prompt, all pages
of the sequences are unpacked once (models/layers/unpacked_pages.py). Otherwise sparse_mla_packed unpacks the rows of
each query, in memory or in registers: in csrc/dsa/packed_mla.cu for the geometry of DeepSeek-V3.2 on Hopper, and in
Triton for others.

Lower bound: every packed row read once, every unpacked row written once.
"""

import torch

from ...common.arithmetic import ceil_div
from ..backends.dispatch import Impl, use_triton
from .packed_format import GROUP, LARGEST, SMALLEST_SCALE
from .sparse_mla import SparseMlaImpl, check_rows, check_strides, sparse_mla
from .sparse_mla_cuda import PACKED_HEADS, launch_packed_mla_cuda, unsuitable_packed

_WORKSPACE_BYTES = 256 << 20
"""The most memory for unpacked rows."""
FUSED_HEADS = PACKED_HEADS
"""With up to this many heads, sparse_mla_packed reads packed rows directly on a GPU. For 32 queries and 2,048 rows on
an H200, this takes 23 us (Triton: 48), instead of 28 us to unpack the rows and 35 us to attend to them.
"""


def rows_at_once(dim: int, dtype: torch.dtype) -> int:
    """Unpacked rows of `dim` elements that the workspace has room for."""
    return _WORKSPACE_BYTES // (dim * dtype.itemsize)


def packed_bytes(kv_rank: int, rope_dim: int) -> int:
    """Bytes of a packed row; raises ValueError if scales or the rotated part would be misaligned."""
    if kv_rank % 4 or rope_dim % 2:
        raise ValueError(f"a packed row has a multiple of 4 in fp8 and of 2 in bf16, got {kv_rank} and {rope_dim}")
    return kv_rank + 4 * ceil_div(kv_rank, GROUP) + 2 * rope_dim


def pack_rows_reference(rows: torch.Tensor, kv_rank: int) -> torch.Tensor:
    """uint8 [N, bytes] of rows [N, R + P]."""
    latent, turned = rows[:, :kv_rank].float(), rows[:, kv_rank:].to(torch.bfloat16)
    groups = torch.nn.functional.pad(latent, (0, -kv_rank % GROUP)).view(len(rows), -1, GROUP)
    scales = (groups.abs().amax(dim=-1) / LARGEST).clamp_(min=SMALLEST_SCALE)
    fp8 = (groups / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(1)[:, :kv_rank]
    return torch.cat([part.contiguous().view(torch.uint8) for part in (fp8, scales, turned)], dim=1)


def unpack_rows_reference(packed: torch.Tensor, kv_rank: int, dtype: torch.dtype) -> torch.Tensor:
    """[N, R + P] of uint8 [N, bytes]."""
    scale_bytes = 4 * ceil_div(kv_rank, GROUP)
    fp8, scales, turned = torch.split_with_sizes(
        packed, (kv_rank, scale_bytes, packed.shape[1] - kv_rank - scale_bytes), dim=1
    )
    latent = fp8.contiguous().view(torch.float8_e4m3fn).float()
    latent *= scales.contiguous().view(torch.float32).repeat_interleave(GROUP, dim=1)[:, :kv_rank]
    return torch.cat((latent.to(dtype), turned.contiguous().view(torch.bfloat16).to(dtype)), dim=1)


def unpack_rows(
    pages: torch.Tensor, rows: torch.Tensor, *, kv_rank: int, dtype: torch.dtype, impl: Impl = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The unpacked rows and their indices; see the module docstring."""
    page_size, dim = pages.shape[1], _unpacked_dim(pages, kv_rank)
    if rows.ndim != 2 or rows.dtype != torch.int32:
        raise ValueError(f"rows {rows.dtype} {list(rows.shape)} are not [tokens, k] of int32")
    unpacked = torch.empty(rows.numel(), 1, dim, dtype=dtype, device=pages.device)
    if use_triton(impl, pages.device):
        from .packed_rows_triton import launch_unpack_rows

        places = torch.empty_like(rows)
        launch_unpack_rows(pages, rows, unpacked, places, kv_rank)
        return unpacked, places
    chosen = rows.flatten()
    real = chosen >= 0
    chosen = chosen[real].long()
    unpacked[real, 0] = unpack_rows_reference(pages[chosen // page_size, chosen % page_size], kv_rank, dtype)
    numbers = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device)
    return unpacked, numbers.view(rows.shape).masked_fill_(rows < 0, -1)


def unpack_pages(
    pages: torch.Tensor,
    sources: torch.Tensor,
    count: torch.Tensor,
    *,
    kv_rank: int,
    dtype: torch.dtype,
    impl: Impl = "auto",
) -> torch.Tensor:
    """The unpacked pages; see the module docstring. What is launched depends only on shapes."""
    page_size, dim = pages.shape[1], _unpacked_dim(pages, kv_rank)
    if (sources.ndim, sources.dtype, count.shape, count.dtype) != (1, torch.int32, (1,), torch.int32):
        raise ValueError(
            f"sources {sources.dtype} {list(sources.shape)} and count {count.dtype} {list(count.shape)} are not int32 "
            "[pages] and [1]"
        )
    unpacked = torch.empty(len(sources), page_size, dim, dtype=dtype, device=pages.device)
    if use_triton(impl, pages.device):
        from .packed_rows_triton import launch_unpack_pages

        if len(sources):
            launch_unpack_pages(pages, sources, count, unpacked, kv_rank)
        return unpacked
    used = int(count)
    packed = pages[sources[:used].long()].flatten(0, 1)
    unpacked[:used] = unpack_rows_reference(packed, kv_rank, dtype).view(used, page_size, dim)
    return unpacked


def _unpacked_dim(pages: torch.Tensor, kv_rank: int) -> int:
    """Elements of an unpacked row; raises ValueError if `pages` hold none."""
    rope_dim = (pages.shape[2] - kv_rank - 4 * ceil_div(kv_rank, GROUP)) // 2
    if pages.dtype != torch.uint8 or rope_dim < 0 or packed_bytes(kv_rank, rope_dim) != pages.shape[2]:
        raise ValueError(f"{pages.dtype} pages {list(pages.shape)} do not hold packed rows of {kv_rank} in fp8")
    return kv_rank + rope_dim


def sparse_mla_packed(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: torch.Tensor,
    *,
    scale: float,
    value_dim: int,
    impl: SparseMlaImpl = "auto",
    fused: bool | None = None,
) -> torch.Tensor:
    """sparse_mla.py over packed pages. If `fused`, the attention kernel unpacks rows in registers. Otherwise rows are
    first unpacked into a workspace, some tokens at a time. With None, the number of heads decides.
    """
    tokens, heads, dim = query.shape
    if impl == "cuda" or (use_triton(impl, query.device) and (heads <= FUSED_HEADS if fused is None else fused)):
        return _sparse_mla_fused(query, pages, rows, scale=scale, value_dim=value_dim, impl=impl)
    at_once = max(rows_at_once(dim, query.dtype) // max(rows.shape[1], 1), 1)
    parts = []
    for first in range(0, tokens, at_once):
        part = slice(first, first + at_once)
        unpacked = unpack_rows(pages, rows[part], kv_rank=value_dim, dtype=query.dtype, impl=impl)
        parts.append(sparse_mla(query[part], *unpacked, scale=scale, value_dim=value_dim, impl=impl))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sparse_mla_fused(
    query: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, *, scale: float, value_dim: int, impl: SparseMlaImpl
) -> torch.Tensor:
    tokens, heads, dim = query.shape
    if _unpacked_dim(pages, value_dim) != dim:
        raise ValueError(f"pages {list(pages.shape)} do not hold packed rows for query {list(query.shape)}")
    check_rows(query, rows)
    check_strides(query, pages, rows)
    reason = unsuitable_packed(query, pages, scale=scale, value_dim=value_dim)
    if impl == "cuda" and reason is not None:
        raise ValueError(f"the CUDA kernel of sparse_mla_packed does not support this: {reason}")
    out = torch.empty(tokens, heads, value_dim, dtype=query.dtype, device=query.device)
    if not tokens:
        return out
    if impl != "triton" and reason is None:
        launch_packed_mla_cuda(query, pages, rows, out, scale=scale)
    else:
        from .packed_rows_triton import launch_sparse_mla_packed

        launch_sparse_mla_packed(query, pages, rows, out, scale=scale)
    return out
