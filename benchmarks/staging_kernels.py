"""Speed of gather and scatter alone: benchmarks/staging.py --kernels."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table

from benchmarks.staging_pair import Shape
from pdserve.common.arithmetic import ceil_div
from pdserve.kernels.staging.kv_stage import block_bytes, kv_gather, kv_scatter


def call_seconds(call: Callable[[], object], device: str, repeats: int = 20) -> float:
    """Median seconds of one call. On a GPU it is the GPU's own time: work queued before hides the launch."""
    call()
    times = []
    ahead = torch.empty(1 << 30, dtype=torch.uint8, device=device) if device == "cuda" else None
    for _ in range(repeats):
        if ahead is None:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        ahead.fill_(0)  # 0.2 ms, and evicts the call's inputs from the cache
        ahead.fill_(1)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def kernel_rates(shape: Shape, size_mib: int) -> dict[str, Any]:
    """Bytes read and written per second by gather (a rank's pool) and scatter (a head slice of the whole pool)."""
    tokens = max(1, (size_mib << 20) // (2 * shape.layers * shape.rank_heads * shape.row_bytes))
    pages = ceil_div(tokens, shape.page_size) + 1
    order = torch.randperm(pages, device=shape.device).to(torch.int32)
    source, target = (
        torch.randint(
            0,
            256,
            (pages, shape.layers, 2, heads, shape.page_size, shape.row_bytes),
            dtype=torch.uint8,
            device=shape.device,
        )
        for heads in (shape.rank_heads, shape.heads)
    )
    size = block_bytes(source, tokens=tokens, layers=shape.layers, heads=shape.rank_heads)
    block, copy = (torch.empty(size, dtype=torch.uint8, device=shape.device) for _ in range(2))
    where: dict[str, Any] = {"start": 0, "end": tokens, "layers": range(shape.layers)}
    ours, theirs = range(shape.rank_heads), shape.heads_of(shape.ranks - 1)

    def gather() -> None:
        kv_gather(source, order, block, **where, heads=ours)

    def scatter() -> None:
        kv_scatter(block, target, order, **where, heads=theirs)

    gather()
    kv_gather(source, order, copy, **where, heads=ours, impl="reference")
    assert block.equal(copy), "gather differs from its reference"
    scatter()
    kv_gather(target, order, copy, **where, heads=theirs, impl="reference")
    assert block.equal(copy), "scatter differs from its reference"
    seconds = {
        "copy": call_seconds(lambda: copy.copy_(block), shape.device),
        "gather": call_seconds(gather, shape.device),
        "scatter": call_seconds(scatter, shape.device),
    }
    return {"mib": size / 2**20, **{name: 2 * size / value / 1e9 for name, value in seconds.items()}}


def kernels_table(shape: Shape, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"bytes read and written per second, {shape.device}, pages of {shape.page_size} tokens")
    for column in ("MiB", "copy GB/s", "gather GB/s", "of copy", "scatter GB/s", "of copy"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['mib']:,.1f}",
            f"{row['copy']:,.1f}",
            *(cell for op in ("gather", "scatter") for cell in (f"{row[op]:,.1f}", f"{row[op] / row['copy']:.0%}")),
        )
    return table
