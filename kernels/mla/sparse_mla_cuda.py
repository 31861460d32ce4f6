"""Launcher of csrc/sparse_mla.cu, which supports only the geometry of DeepSeek-V3.2 on Hopper."""

import functools

import torch

from ...configs.arithmetic import ceil_div
from ..backends.nvrtc import load_kernel, log2_scale_bits
from ..backends.occupancy import multiprocessors

_HEADS = 64
_BLOCK_ROWS = 64
THREADS, SHARED_BYTES = 384, 227 << 10
"""Of a block of csrc/latent_attention.cuh."""
_DIM, _VALUE_DIM = 576, 512
_WORD_BYTES = 16


def unsuitable(query: torch.Tensor, pages: torch.Tensor, *, scale: float, value_dim: int) -> str | None:
    """Why the kernel does not support these tensors (sparse_mla.py has checked that rows are contiguous), or None."""
    reason = unsuitable_latents(query, pages, scale=scale, value_dim=value_dim)
    if reason is None and query.shape[1] % _HEADS:
        return f"{query.shape[1]} heads are not a multiple of {_HEADS}"
    return reason


def unsuitable_latents(query: torch.Tensor, pages: torch.Tensor, *, scale: float, value_dim: int) -> str | None:
    """Why csrc/latent_attention.cuh does not support these tensors, whose rows are contiguous, or None."""
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
    kernel = load_kernel("sparse_mla.cu", "sparse_mla", device, constants, SHARED_BYTES, only_here=True)
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
