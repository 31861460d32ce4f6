"""Launcher of csrc/mla/dense_mla.cu, which supports only latent rows of 512 + 64 elements in 16 bits on Hopper."""

import torch

from ...common.arithmetic import ceil_div
from ..backends.nvrtc import load_kernel, log2_scale_bits
from ..dsa.sparse_mla_cuda import SHARED_BYTES, THREADS
from .tile_plan import TILE_ROWS, TilePlan


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
    """Fill `out` [T, H, 512], except for split tiles, whose results go to `partial` and `log_sum`; not for tensors that
    `unsuitable_latents` refuses.
    """
    heads = query.shape[1]
    constants = (
        ("HEADS", heads),
        ("TILE_TOKENS", plan.tile_tokens),
        ("PAGE_SIZE", plan.page_size),
        ("HALF", int(query.dtype == torch.float16)),
    )
    kernel = load_kernel("mla/dense_mla.cu", "dense_mla", query.device, constants, SHARED_BYTES, only_here=True)
    kernel.launch(
        query.data_ptr(),
        pages.data_ptr(),
        pages.stride(0) * pages.itemsize,
        pages.stride(1) * pages.itemsize,
        plan.pages.data_ptr(),
        plan.pieces.data_ptr(),
        plan.pieces.stride(0),
        log2_scale_bits(scale),
        out.data_ptr(),
        partial.data_ptr(),
        log_sum.data_ptr(),
        blocks=plan.pieces.shape[1] * ceil_div(plan.tile_tokens * heads, TILE_ROWS),
        threads=THREADS,
        shared_bytes=SHARED_BYTES,
        overlap_previous=True,
    )
