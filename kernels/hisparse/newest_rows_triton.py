"""newest_rows of slot_tables.py in one launch: torch needs twenty, at the start of every decode step."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

_ROWS_AT_ONCE = 128


@triton.jit(do_not_specialize=["batch"])
def _newest_rows(
    order_ptr,
    capacity_ptr,
    pages_ptr,
    requests_ptr,
    lengths_ptr,
    rows_ptr,
    order_group_stride,
    order_stride,
    pages_stride,
    batch,
    hot_rows,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < batch
    request = tl.load(requests_ptr + row, mask=inside, other=0).to(tl.int64)
    length = tl.load(lengths_ptr + row, mask=inside, other=0)
    real = inside & (length > 0)
    reserved = tl.load(order_ptr + group * order_group_stride + request * order_stride + hot_rows, mask=real, other=0)
    resident = length <= tl.load(capacity_ptr + request, mask=real, other=0)
    slot = tl.where(resident, length - 1, reserved.to(tl.int32))
    page = tl.load(pages_ptr + request * pages_stride + slot // PAGE, mask=real, other=0)
    tl.store(rows_ptr + group * batch + row, tl.where(real, page * PAGE + slot % PAGE, -1), mask=inside)


def launch_newest_rows(
    eviction_order: torch.Tensor,
    capacity: torch.Tensor,
    hot_pages: torch.Tensor,
    requests: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    *,
    page_size: int,
) -> None:
    """Fill `rows` [groups, batch]; `eviction_order` is that of all groups, [groups, requests, B + 1]."""
    groups, batch = rows.shape
    if batch == 0:
        return
    _newest_rows[(groups, triton.cdiv(batch, _ROWS_AT_ONCE))](
        eviction_order,
        capacity,
        hot_pages,
        requests,
        seq_lens,
        rows,
        *eviction_order.stride()[:2],
        hot_pages.stride(0),
        batch,
        eviction_order.shape[2] - 1,
        PAGE=page_size,
        BLOCK=_ROWS_AT_ONCE,
    )
