"""Launcher of csrc/dense_mla.cu, which supports only latent rows of 512 + 64 elements in 16 bits on Hopper."""

import math
import struct

import torch

from ...configs.arithmetic import ceil_div
from ..backends.nvrtc import load_kernel
from .tile_plan import TILE_ROWS, TilePlan

_THREADS = 384
_SHARED_BYTES = 227 << 10
_DIM, _VALUE_DIM = 576, 512
_WORD_BYTES = 16


def unsuitable(query: torch.Tensor, pages: torch.Tensor, *, scale: float, value_dim: int) -> str | None:
    """Why the kernel does not support these tensors (dense_mla.py has checked that rows are contiguous), or None."""
    if query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) != (9, 0):
        return "it needs a GPU of compute capability 9.0"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"{query.dtype} is neither bfloat16 nor float16"
    if (query.shape[2], value_dim) != (_DIM, _VALUE_DIM):
        return f"rows have {query.shape[2]} elements and {value_dim} values, not {_DIM} and {_VALUE_DIM}"
    if not scale > 0:
        return f"scale {scale} is not positive"
    if query.data_ptr() % _WORD_BYTES:
        return f"query does not start at a multiple of {_WORD_BYTES} bytes"
    strides = [stride * pages.itemsize for stride in pages.stride()[:2]]
    if any(number % _WORD_BYTES for number in (pages.data_ptr(), *strides)):
        return f"pages has rows that do not start at multiples of {_WORD_BYTES} bytes"
    return None


def launch_dense_mla_cuda(
    query: torch.Tensor,
    pages: torch.Tensor,
    plan: TilePlan,
    out: torch.Tensor,
    partial: torch.Tensor,
    log_sum: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Fill `out` [T, H, 512], except for split tiles, whose results go to `partial` and `log_sum`; not for `unsuitable`
    tensors.
    """
    heads = query.shape[1]
    constants = (
        ("HEADS", heads),
        ("TILE_TOKENS", plan.tile_tokens),
        ("PAGE_SIZE", plan.page_size),
        ("HALF", int(query.dtype == torch.float16)),
    )
    (scale_bits,) = struct.unpack("<i", struct.pack("<f", scale / math.log(2)))
    kernel = load_kernel("dense_mla.cu", "dense_mla", query.device, constants, _SHARED_BYTES, only_here=True)
    kernel.launch(
        query.data_ptr(),
        pages.data_ptr(),
        pages.stride(0) * pages.itemsize,
        pages.stride(1) * pages.itemsize,
        plan.pages.data_ptr(),
        plan.pieces.data_ptr(),
        plan.pieces.stride(0),
        scale_bits,
        out.data_ptr(),
        partial.data_ptr(),
        log_sum.data_ptr(),
        blocks=plan.pieces.shape[1] * ceil_div(plan.tile_tokens * heads, TILE_ROWS),
        threads=_THREADS,
        shared_bytes=_SHARED_BYTES,
        overlap_previous=True,
    )
