"""Launcher of csrc/attention/prefill_attention.cu: attention of tiles of queries, for heads of 128 16-bit elements on
Hopper.

Keys and values are in blocks of 128 tokens, as paged_prefill_triton.py copies them out of their pages. A block already
has the swizzled layout that warpgroup products read from shared memory, so one bulk copy without a tensor map loads it.

Lower bound: 4 * D * Hq * (pairs of a query and a visible key) operations. The kernel does 628 TFLOP/s for a prompt of
8,192 tokens (H200; Triton's 482).
"""

import torch

from ..backends.nvrtc import load_kernel, log2_scale_bits
from ..backends.occupancy import multiprocessors
from .attention_plan import Tiles, WorkPlan

_DIM = 128
_THREADS = 384
_SHARED_BYTES = 161 << 10


def supports(query: torch.Tensor) -> bool:
    """Whether the kernel supports queries [tokens, Hq, D]; each row's heads are contiguous."""
    return (
        query.device.type == "cuda"
        and torch.cuda.get_device_capability(query.device) == (9, 0)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[2] == _DIM
        and query.data_ptr() % 16 == 0
        and query.stride(0) * query.itemsize % 16 == 0
    )


def launch_tiles(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: WorkPlan,
    tiles: Tiles,
    partial: torch.Tensor,
    log_sum: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Compute `tiles`, for queries that the kernel `supports`: their rows of `out` or, for parts of divided tiles,
    their results and log-sums in `partial` and `log_sum`.
    """
    device, heads = query.device, query.shape[1]
    constants = (("GROUP", heads // plan.num_kv_heads), ("HALF", int(query.dtype == torch.float16)))
    kernel = load_kernel(
        "attention/prefill_attention.cu", "prefill_attention", device, constants, _SHARED_BYTES, only_here=True
    )
    kernel.launch(
        query.data_ptr(),
        query.stride(0) * query.itemsize,
        keys.data_ptr(),
        values.data_ptr(),
        plan.kv_lens.data_ptr(),
        plan.query_lens.data_ptr(),
        plan.row_starts.data_ptr(),
        tiles.tiles.data_ptr(),
        tiles.tiles.stride(0),
        plan.copy_starts.data_ptr(),
        plan.copied_tokens,
        tiles.counts.data_ptr(),
        log2_scale_bits(scale),
        partial.data_ptr(),
        log_sum.data_ptr(),
        out.data_ptr(),
        heads,
        blocks=min(tiles.tiles.shape[1] * heads, multiprocessors(device)),
        threads=_THREADS,
        shared_bytes=_SHARED_BYTES,
        overlap_previous=True,
    )
