"""Swap-in for sparse attention: looks up selected tokens in the hot buffer, and fetches the rows that are missing.

The rows of all tokens are in pinned host memory; the GPU holds B rows of each request under LRU replacement, and the
newest row. Once per step and index group, `swap_in` plans, updates the tables (slot_tables.py) and fetches the missing
rows of the group's first layer; `copy_misses` fetches the same rows for each further layer. For an evicting sequence,
with n = seq_len - 1 its newest token and `order` its slots in eviction order (n was written to the last one before):

    hits      slots of selected tokens, in eviction order; stale = the other slots, in eviction order
    misses    selected tokens without a slot, except n, in the order of top-k, each once
    loaded    the first len(misses) of stale: the i-th takes the i-th miss
    order     the rest of stale, loaded, hits, slot of n; then the first is vacated for the next token and goes last

This is exact LRU: a slot is evicted before all slots that were used in a later step. The newest token becomes an
ordinary row in its slot, without a fetch.

    rows[t, i]                           flat hot row of token top_k[t, i], the same for duplicates; -1 if the token is
                                         not in [0, seq_len)
    miss_sources[t, j], miss_rows[t, j]  host row and hot row of each of miss_counts[t] misses, in any order

A fully resident sequence has token p in slot p and no misses; its tables do not change, nor do those of padded batch
rows, whose seq_len is 0. Every selectable token except the newest must be in host memory. Shapes: top_k [batch, K]
int32, K <= B; requests (distinct except padding), seq_lens [batch] int32, at most max_context; host_pages [batch,
pages] int32, those of each row's sequence up to its newest token. Pools of one layer, host (pinned if hot is on a GPU)
and hot: [pages, S, row_bytes] uint8; rows contiguous, other strides free. Rows that start at multiples of 16 bytes are
faster.

Lower bound: misses * row bytes over PCIe. On the GPU one launch does both, so that fetches start while plans are made.
"""

import torch

from ..backends.nvrtc import CudaImpl, use_cuda
from .slot_tables import SlotTables
from .swap_plan import SwapPlan


def plan_reference(
    plan: SwapPlan,
    top_k: torch.Tensor,
    requests: torch.Tensor,
    seq_lens: torch.Tensor,
    tables: SlotTables,
    host_pages: torch.Tensor,
) -> None:
    plan.rows.fill_(-1)
    plan.miss_counts.zero_()
    for row, (request, seq_len) in enumerate(zip(requests.tolist(), seq_lens.tolist(), strict=True)):
        selected = top_k[row].long()
        valid = (selected >= 0) & (selected < seq_len)
        tokens = selected[valid]
        if seq_len <= int(tables.capacity[request]):
            plan.rows[row, valid] = tables.flat_rows(requests[row], tokens.int())
            continue
        slots, misses, loaded = _replace(tables, request, tokens, newest=seq_len - 1)
        plan.rows[row, valid] = tables.flat_rows(requests[row], slots.int())
        plan.miss_counts[row] = len(misses)
        pages = host_pages[row, misses // tables.page_size]
        plan.miss_sources[row, : len(misses)] = pages * tables.page_size + (misses % tables.page_size).int()
        plan.miss_rows[row, : len(misses)] = tables.flat_rows(requests[row], loaded.int())


def _replace(
    tables: SlotTables, request: int, tokens: torch.Tensor, newest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step of one evicting sequence: slots of the selected tokens, the missing tokens, the slots that take them."""
    slot_tokens, token_slots = tables.slot_tokens[request], tables.token_slots[request]
    order, reserved = tables.eviction_order[request, :-1].long(), int(tables.eviction_order[request, -1])
    slot_tokens[reserved] = newest
    token_slots[newest] = reserved

    present = token_slots[tokens]
    missing = list(dict.fromkeys(tokens[present < 0].tolist()))
    misses = torch.tensor(missing, dtype=torch.long, device=tokens.device)
    used = torch.zeros_like(slot_tokens, dtype=torch.bool)
    used[present[present >= 0].long()] = True
    hits, stale = order[used[order]], order[~used[order]]
    loaded, left = stale[: len(misses)], stale[len(misses) :]
    tables.lookups.add_(tables.lookups.new_tensor([len(hits), len(misses)]))

    evicted = slot_tokens[loaded]
    token_slots[evicted[evicted >= 0].long()] = -1
    slot_tokens[loaded] = misses.int()
    token_slots[misses] = loaded.short()
    slots = token_slots[tokens].long()

    order = torch.cat((left, loaded, hits, order.new_tensor([reserved])))
    vacated = slot_tokens[order[0]]
    if vacated >= 0:
        token_slots[vacated] = -1
    slot_tokens[order[0]] = -1
    tables.eviction_order[request] = order.roll(-1).short()
    return slots, misses, loaded


def copy_misses_reference(plan: SwapPlan, host: torch.Tensor, hot: torch.Tensor) -> None:
    page_size = host.shape[1]
    for row, count in enumerate(plan.miss_counts.tolist()):
        sources = plan.miss_sources[row, :count].to(host.device)
        targets = plan.miss_rows[row, :count]
        rows = host[sources // page_size, sources % page_size]
        hot[targets // page_size, targets % page_size] = rows.to(hot.device)


def swap_in(
    plan: SwapPlan,
    top_k: torch.Tensor,
    requests: torch.Tensor,
    seq_lens: torch.Tensor,
    tables: SlotTables,
    host_pages: torch.Tensor,
    host: torch.Tensor,
    hot: torch.Tensor,
    *,
    impl: CudaImpl = "auto",
) -> None:
    """Fill `plan`, update `tables`, fetch the misses into `hot`; see the module docstring.

    Call it once per step: `seq_lens` of an evicting sequence grow by one from call to call.
    """
    batch, width = top_k.shape
    if tables.slot_tokens.dim() != 2:
        raise ValueError("a plan is for one index group: pass tables.group(i)")
    if width > tables.hot_rows:
        raise ValueError(f"top_k selects {width} tokens, the hot buffer has {tables.hot_rows} rows")
    if not plan.rows.shape == plan.miss_sources.shape == plan.miss_rows.shape == top_k.shape:
        raise ValueError(f"the plan is for {list(plan.rows.shape)}, top_k is {list(top_k.shape)}")
    if not plan.miss_counts.shape == requests.shape == seq_lens.shape == (batch,):
        raise ValueError(f"requests {list(requests.shape)} and seq_lens {list(seq_lens.shape)} do not fit {batch} rows")
    _check_pools(host, hot)
    if host.shape[1] != tables.page_size:
        raise ValueError(f"pools have pages of {host.shape[1]} rows, the tables are for {tables.page_size}")
    if len(host_pages) != batch:
        raise ValueError(f"host_pages {list(host_pages.shape)} do not fit {batch} rows")
    integers = (top_k, requests, seq_lens, host_pages)
    if any(tensor.dtype != torch.int32 or tensor.device != hot.device for tensor in integers):
        raise ValueError(f"indices must be int32 on {hot.device}, got {[(t.dtype, t.device) for t in integers]}")
    if any(tensor.stride(-1) != 1 for tensor in integers):
        raise ValueError("the last dimension of all indices must be contiguous")
    if not use_cuda(impl, hot.device):
        plan_reference(plan, top_k, requests, seq_lens, tables, host_pages)
        copy_misses_reference(plan, host, hot)
        return
    from .swap_in_cuda import launch_swap_in

    launch_swap_in(plan, top_k, requests, seq_lens, tables, host_pages, host, hot)


def copy_misses(plan: SwapPlan, host: torch.Tensor, hot: torch.Tensor, *, impl: CudaImpl = "auto") -> None:
    """Fetch the misses of a plan for another layer of its index group."""
    _check_pools(host, hot)
    if not use_cuda(impl, hot.device):
        copy_misses_reference(plan, host, hot)
        return
    from .swap_in_cuda import launch_copy_misses

    launch_copy_misses(plan, host, hot)


def _check_pools(host: torch.Tensor, hot: torch.Tensor) -> None:
    if host.dtype != torch.uint8 or hot.dtype != torch.uint8 or host.shape[1:] != hot.shape[1:]:
        raise ValueError(
            f"host {list(host.shape)} {host.dtype} and hot {list(hot.shape)} {hot.dtype} are not pages of equal bytes"
        )
    if host.stride(2) != 1 or hot.stride(2) != 1:
        raise ValueError(f"rows must be contiguous, strides are {host.stride()} and {hot.stride()}")
