"""Launchers of csrc/dsa/sparse_mla.cu and csrc/dsa/packed_mla.cu, for the geometry of DeepSeek-V3.2 on Hopper."""

import functools

import torch

from ...common.arithmetic import ceil_div
from ..backends.nvrtc import load_kernel, log2_scale_bits
from ..backends.occupancy import multiprocessors

_HEADS = 64
_BLOCK_ROWS = 64
THREADS, SHARED_BYTES = 384, 227 << 10
"""Of a block of csrc/mla/latent_attention.cuh."""
_DIM, _VALUE_DIM = 576, 512
_WORD_BYTES = 16
_FEW_PACKED_BLOCKS = 4
PACKED_HEADS = 16
"""The most heads that csrc/dsa/packed_mla.cu supports."""
_PACKED_THREADS = 256
_PACKED_SHARED_BYTES = 113 << 10
"""Of a block of csrc/dsa/packed_mla.cu; two of them run on a multiprocessor."""


def unsuitable(query: torch.Tensor, pages: torch.Tensor, *, scale: float, value_dim: int) -> str | None:
    """Why the kernel does not support these tensors (sparse_mla.py has checked that rows are contiguous), or None."""
    reason = unsuitable_latents(query, pages, scale=scale, value_dim=value_dim)
    if reason is None and query.shape[1] % _HEADS:
        return f"{query.shape[1]} heads are not a multiple of {_HEADS}"
    return reason


def unsuitable_latents(query: torch.Tensor, pages: torch.Tensor, *, scale: float, value_dim: int) -> str | None:
    """Why csrc/mla/latent_attention.cuh does not support these tensors, whose rows are contiguous, or None."""
    if query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) != (9, 0):
        return "it needs a GPU of compute capability 9.0"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"{query.dtype} is neither bfloat16 nor float16"
    if (query.shape[2], value_dim) != (_DIM, _VALUE_DIM):
        return f"rows have {query.shape[2]} elements and {value_dim} values, not {_DIM} and {_VALUE_DIM}"
    if not scale > 0:
        return f"scale {scale} is not positive"
    for name, tensor in (("query", query), ("pages", pages)):
        strides = [stride * tensor.itemsize for stride in tensor.stride()[:2]]
        if any(number % _WORD_BYTES for number in (tensor.data_ptr(), *strides)):
            return f"{name} has rows that do not start at multiples of {_WORD_BYTES} bytes"
    return None


@functools.cache
def num_shares(tiles: int, blocks: int, sms: int) -> int:
    """Shares to split the `blocks` of rows of each of `tiles` (a token, 64 heads) into; one block per SM.

    The shares of a tile must run within one GPC, so with 4 or 8 not every SM can be used: half of them are assumed. 32
    clusters of 4 took two waves on an H200.
    """
    if 2 * tiles > sms:
        return 1
    return next(shares for shares in (8, 4, 2, 1) if shares <= blocks and (shares <= 2 or 2 * shares * tiles <= sms))


def launch_sparse_mla_cuda(
    query: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, *, scale: float
) -> None:
    """Fill `out` [T, H, 512]; not for `unsuitable` tensors."""
    tokens, heads, _ = query.shape
    if not tokens:
        return
    device = query.device
    tiles, blocks = tokens * heads // _HEADS, max(ceil_div(rows.shape[1], _BLOCK_ROWS), 1)
    shares = num_shares(tiles, blocks, multiprocessors(device))
    constants = (("SHARES", shares), ("PAGE_SIZE", pages.shape[1]), ("HALF", int(query.dtype == torch.float16)))
    kernel = load_kernel("dsa/sparse_mla.cu", "sparse_mla", device, constants, SHARED_BYTES, only_here=True)
    kernel.launch(
        query.data_ptr(),
        query.stride(0) * query.itemsize,
        query.stride(1) * query.itemsize,
        pages.data_ptr(),
        pages.stride(0) * pages.itemsize,
        pages.stride(1) * pages.itemsize,
        rows.data_ptr(),
        rows.stride(0),
        rows.shape[1],
        ceil_div(blocks, shares) * _BLOCK_ROWS,
        log2_scale_bits(scale),
        out.data_ptr(),
        heads,
        blocks=tiles * shares,
        threads=THREADS,
        shared_bytes=SHARED_BYTES,
        overlap_previous=True,
    )


def unsuitable_packed(query: torch.Tensor, pages: torch.Tensor, *, scale: float, value_dim: int) -> str | None:
    """Why csrc/dsa/packed_mla.cu does not support these tensors, `pages` of packed rows (packed_rows.py), or None."""
    reason = unsuitable_latents(query, pages, scale=scale, value_dim=value_dim)
    if reason is None and query.dtype != torch.bfloat16:
        return f"{query.dtype} is not bfloat16"
    if reason is None and query.shape[1] > PACKED_HEADS:
        return f"{query.shape[1]} heads are more than {PACKED_HEADS}"
    return reason


@functools.cache
def num_packed_shares(tokens: int, blocks: int, sms: int) -> int:
    """Shares to split the `blocks` of rows of each token into: one per SM if a share then has few blocks, otherwise two
    per SM. Partial results cost time, too: 8 tokens with 2,048 rows took 14.8 us in 16 shares on an H200, 21.0 in 32.
    """
    of_share = ceil_div(blocks, max(sms // tokens, 1))
    if of_share > _FEW_PACKED_BLOCKS:
        of_share = ceil_div(blocks, max(2 * sms // tokens, 1))
    return ceil_div(blocks, of_share)


def launch_packed_mla_cuda(
    query: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, *, scale: float
) -> None:
    """Fill `out` [T, H, 512]; not for `unsuitable_packed` tensors."""
    tokens, heads, _ = query.shape
    blocks = max(ceil_div(rows.shape[1], _BLOCK_ROWS), 1)
    shares = num_packed_shares(tokens, blocks, multiprocessors(query.device))
    partial = log_sum = out
    if shares > 1:
        partial = torch.empty(tokens, shares, heads, _VALUE_DIM, dtype=torch.float32, device=query.device)
        log_sum = torch.empty(tokens, shares, heads, dtype=torch.float32, device=query.device)
    constants = (("ALONE", int(shares == 1)), ("PAGE_SIZE", pages.shape[1]))
    kernel = load_kernel("dsa/packed_mla.cu", "packed_mla", query.device, constants, _PACKED_SHARED_BYTES)
    kernel.launch(
        query.data_ptr(),
        query.stride(0) * query.itemsize,
        query.stride(1) * query.itemsize,
        pages.data_ptr(),
        *pages.stride()[:2],
        rows.data_ptr(),
        rows.stride(0),
        rows.shape[1],
        ceil_div(blocks, shares) * _BLOCK_ROWS,
        shares,
        log2_scale_bits(scale),
        out.data_ptr(),
        partial.data_ptr(),
        log_sum.data_ptr(),
        heads,
        blocks=tokens * shares,
        threads=_PACKED_THREADS,
        shared_bytes=_PACKED_SHARED_BYTES,
        overlap_previous=True,
    )
    if shares > 1:
        from .sparse_mla_triton import launch_combine

        launch_combine(partial, log_sum, out)
