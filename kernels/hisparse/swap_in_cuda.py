"""Launches csrc/hisparse/swap_in.cu and copy_misses.cu. Blocks and threads depend on geometry and device, not counts.

About 300 KB in flight (264 rows of 1,152 bytes) saturate PCIe 5 of an H200. Half of that was 6 % slower, and no way of
loading was faster than one row per warp. So one row per warp on half of the multiprocessors is enough. It leaves room
for the planning blocks, for which the copying blocks wait. More blocks would only slow down other work, because
copy_misses runs concurrently with the layers.
"""

import torch

from ...common.arithmetic import ceil_div, round_up
from ..backends.nvrtc import device_address, load_kernel
from ..backends.occupancy import multiprocessors
from .slot_tables import SlotTables, bucket_bits, plan_shared_bytes
from .swap_plan import SwapPlan

COPY_THREADS = 256
MAX_EARLY_ROW_BYTES = 2048  # a row fetched during planning is in registers: 4 words of 16 bytes per lane


def plan_threads(top_k: int, hot_rows: int) -> int:
    """Threads of a planning block: whole warps, for 2 selected tokens and 4 slots per thread, at most 1024."""
    return min(1024, round_up(max(ceil_div(top_k, 2), ceil_div(hot_rows, 4)), 32))


def copy_blocks(device: torch.device) -> int:
    return max(1, multiprocessors(device) // 2)


def launch_swap_in(
    plan: SwapPlan,
    top_k: torch.Tensor,
    requests: torch.Tensor,
    seq_lens: torch.Tensor,
    tables: SlotTables,
    host_pages: torch.Tensor,
    host: torch.Tensor,
    hot: torch.Tensor,
) -> None:
    (batch, width), row_bytes = top_k.shape, hot.shape[2]
    if batch == 0:
        return
    threads = plan_threads(width, tables.hot_rows)
    shared_bytes = max(plan_shared_bytes(width, tables.hot_rows, tables.page_size), 4 * batch)
    constants = {
        "TOP_K": width,
        "HOT_ROWS": tables.hot_rows,
        "PAGE_SIZE": tables.page_size,
        "ROW_BYTES": row_bytes,
        "THREADS": threads,
        "BUCKET_BITS": bucket_bits(width),
    }
    host_address = device_address(host)
    in_words = (host_address, *host.stride()[:2], hot.data_ptr(), *hot.stride()[:2], row_bytes)
    fetch_early = int(row_bytes <= MAX_EARLY_ROW_BYTES and all(number % 16 == 0 for number in in_words))
    load_kernel("hisparse/swap_in.cu", "swap_in", hot.device, tuple(constants.items()), shared_bytes).launch(
        top_k.data_ptr(),
        top_k.stride(0),
        requests.data_ptr(),
        seq_lens.data_ptr(),
        tables.capacity.data_ptr(),
        tables.hot_pages.data_ptr(),
        tables.hot_pages.stride(0),
        tables.slot_tokens.data_ptr(),
        tables.slot_tokens.stride(0),
        tables.token_slots.data_ptr(),
        tables.token_slots.stride(0),
        tables.eviction_order.data_ptr(),
        tables.eviction_order.stride(0),
        tables.lookups.data_ptr(),
        host_pages.data_ptr(),
        host_pages.stride(0),
        plan.rows.data_ptr(),
        plan.miss_sources.data_ptr(),
        plan.miss_rows.data_ptr(),
        plan.miss_counts.data_ptr(),
        plan.signals.data_ptr(),
        batch,
        host_address,
        *host.stride()[:2],
        hot.data_ptr(),
        *hot.stride()[:2],
        fetch_early,
        blocks=batch + copy_blocks(hot.device),
        threads=threads,
        shared_bytes=shared_bytes,
        overlap_previous=True,
    )


def launch_copy_misses(plan: SwapPlan, host: torch.Tensor, hot: torch.Tensor) -> None:
    batch, width = plan.miss_sources.shape
    if batch == 0:
        return
    constants = {"TOP_K": width, "PAGE_SIZE": host.shape[1], "ROW_BYTES": hot.shape[2], "THREADS": COPY_THREADS}
    load_kernel("hisparse/copy_misses.cu", "copy_misses", hot.device, tuple(constants.items())).launch(
        plan.miss_sources.data_ptr(),
        plan.miss_rows.data_ptr(),
        plan.miss_counts.data_ptr(),
        plan.signals[batch:].data_ptr(),
        batch,
        device_address(host),
        *host.stride()[:2],
        hot.data_ptr(),
        *hot.stride()[:2],
        blocks=copy_blocks(hot.device),
        threads=COPY_THREADS,
        shared_bytes=4 * batch,
    )
