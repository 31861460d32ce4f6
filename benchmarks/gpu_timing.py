"""Timing of GPU work, and the GPU's copy rate."""

import statistics
from collections.abc import Callable

import torch

DEVICE = torch.device("cuda", 0)
PRODUCT_RATE = 790e12
"""FLOP/s of large bfloat16 matrix products on an H200, measured."""


def gpu_ms(call: Callable[[], object], repeats: int) -> float:
    """Median GPU time of one call."""
    events = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in events))


def copy_rate() -> float:
    """Bytes per second of a large device-to-device copy, read and written."""
    source = torch.randint(0, 256, (2 << 30,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    gpu_ms(lambda: target.copy_(source), 20)
    return 2 * source.nbytes / (gpu_ms(lambda: target.copy_(source), 20) / 1e3)
