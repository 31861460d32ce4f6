"""Properties of a GPU that decide what runs at the same time, and counters for programs that divide a sum."""

import functools
from typing import Any

import torch

from .streams import is_beside

_COUNTERS = 4096


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The multiprocessors of a GPU; on a CPU, a number for tests in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have."""
    if device.type != "cuda":
        return 99 << 10
    properties: Any = torch.cuda.get_device_properties(device)  # torch does not annotate this one
    return int(properties.shared_memory_per_block_optin)


@functools.cache
def is_hopper_or_later(device: torch.device) -> bool:
    """Whether kernels can start before the previous one ends, and blocks can form clusters."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def counters_of(device: torch.device) -> torch.Tensor:
    """Counters that are zero before and after every kernel that uses them. Kernels on the side stream (streams.py)
    have their own, because kernels that use the same counters must run one after another.
    """
    return _counters(device, is_beside())


@functools.cache
def _counters(device: torch.device, _beside: bool) -> torch.Tensor:
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
