"""Timing of GPU work, and the GPU's rates of copies and products."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch

DEVICE = torch.device("cuda", 0)
PRODUCT_RATE = 790e12
"""FLOP/s of large bfloat16 matrix products on an H200, measured."""


def gpu_ms(call: Callable[[], object], repeats: int) -> float:
    """Median GPU time of one call; without a GPU, its wall time."""
    if not torch.cuda.is_available():
        walls = []
        for _ in range(repeats):
            begun = time.perf_counter()
            call()
            walls.append((time.perf_counter() - begun) * 1e3)
        return statistics.median(walls)
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


def product_rates(size: int = 8192) -> dict[torch.dtype, float]:
    """FLOP/s of square products in bfloat16 and in fp8 with a scale per row."""
    left, right = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    left_8, right_8 = (part.to(torch.float8_e4m3fn) for part in (left, right))
    scales = torch.ones(size, 1, device=DEVICE)

    def fp8_product() -> torch.Tensor:
        return torch._scaled_mm(left_8, right_8.t(), scales, scales.t(), out_dtype=torch.bfloat16)

    calls = {torch.bfloat16: lambda: left @ right.t(), torch.float8_e4m3fn: fp8_product}
    for call in calls.values():
        gpu_ms(call, 5)
    return {dtype: 2 * size**3 / (gpu_ms(call, 20) / 1e3) for dtype, call in calls.items()}


def list_kernels(name: str, call: Callable[[], object]) -> None:
    """Print the kernels of one call. A kernel counts from the end of the one before it: many start early and wait."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_gpu = [event for event in profile.events() if event.device_type.name == "CUDA"]
    spans = sorted((event.time_range.end, event.time_range.start, event.key) for event in on_gpu)
    taken: defaultdict[str, list[float]] = defaultdict(list)
    idle, ended = 0.0, min((start for _, start, _ in spans), default=0.0)
    for end, start, key in spans:
        idle += max(start - ended, 0.0)
        taken[key].append(end - max(start, ended))
        ended = end
    total = sum(map(sum, taken.values()))
    print(f"\nkernels of {name}: {len(spans)} launches, {total / 1e3:.2f} ms, and {idle / 1e3:.2f} ms between them")
    for key, times in sorted(taken.items(), key=lambda item: -sum(item[1]))[:30]:
        print(f"{sum(times):9.1f} us {len(times):4}  {key[:90]}")
