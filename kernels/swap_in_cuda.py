"""Launches of csrc/swap_in.cu: block sizes and grids from the geometry and the device, never from counts of misses."""

import torch

from .nvrtc import CudaKernel, device_address, load_kernel
from .slot_tables import SlotTables, bucket_bits, plan_shared_bytes
from .swap_in import SwapPlan

COPY_THREADS = 256


def plan_threads(top_k: int, hot_rows: int) -> int:
    """Threads of a planning block: whole warps, enough for 2 selected tokens and 4 slots each, 1024 at most."""
    return min(1024, -(-max(-(-top_k // 2), -(-hot_rows // 4)) // 32) * 32)


def load_plan_kernel(top_k: int, hot_rows: int, page_size: int, threads: int, device: torch.device) -> CudaKernel:
    constants = {
        "TOP_K": top_k,
        "HOT_ROWS": hot_rows,
        "PAGE_SIZE": page_size,
        "THREADS": threads,
        "BUCKET_BITS": bucket_bits(top_k),
    }
    kernel = load_kernel(
        "swap_in.cu", "plan_swap_in", device, tuple(constants.items()), plan_shared_bytes(top_k, hot_rows)
    )
    assert kernel.max_threads >= threads, "__launch_bounds__ says so"
    return kernel


def launch_plan(
    plan: SwapPlan,
    top_k: torch.Tensor,
    requests: torch.Tensor,
    seq_lens: torch.Tensor,
    tables: SlotTables,
    host_pages: torch.Tensor,
    page_size: int,
    live_rows: torch.Tensor | None,
    threads: int | None = None,
) -> None:
    batch, width = top_k.shape
    if batch == 0:
        return
    threads = threads or plan_threads(width, tables.hot_rows)
    kernel = load_plan_kernel(width, tables.hot_rows, page_size, threads, top_k.device)
    kernel.launch(
        top_k.data_ptr(),
        top_k.stride(0),
        requests.data_ptr(),
        seq_lens.data_ptr(),
        0 if live_rows is None else live_rows.data_ptr(),
        tables.slot_tokens.data_ptr(),
        tables.slot_tokens.stride(0),
        tables.token_slots.data_ptr(),
        tables.token_slots.stride(0),
        tables.eviction_order.data_ptr(),
        tables.eviction_order.stride(0),
        host_pages.data_ptr(),
        host_pages.stride(0),
        plan.rows.data_ptr(),
        plan.miss_sources.data_ptr(),
        plan.miss_rows.data_ptr(),
        plan.miss_counts.data_ptr(),
        blocks=batch,
        threads=threads,
        shared_bytes=plan_shared_bytes(width, tables.hot_rows),
    )


def launch_copy(plan: SwapPlan, host: torch.Tensor, hot: torch.Tensor) -> None:
    batch, width = plan.miss_sources.shape
    if batch == 0:
        return
    constants = (("TOP_K", width), ("PAGE_SIZE", host.shape[1]), ("ROW_BYTES", hot.shape[1]))
    kernel = load_kernel("swap_in.cu", "copy_misses", hot.device, constants)
    kernel.launch(
        plan.miss_sources.data_ptr(),
        plan.miss_rows.data_ptr(),
        plan.miss_counts.data_ptr(),
        batch,
        device_address(host),
        host.stride(0),
        host.stride(1),
        hot.data_ptr(),
        hot.stride(0),
        blocks=torch.cuda.get_device_properties(hot.device).multi_processor_count,
        threads=COPY_THREADS,
        shared_bytes=4 * batch,
        overlap_previous=True,
    )
