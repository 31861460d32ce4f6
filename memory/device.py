"""Selects the device that a rank computes on, and measures free memory."""

from pathlib import Path

import torch

from ..common.errors import StartupError
from .cgroup import cgroup_free_bytes


def resolve_device(name: str, local_rank: int = 0, local_ranks: int = 1) -> torch.device:
    """`auto` is CUDA if available, else the CPU. Raises StartupError for a device that this host lacks.

    Each of the `local_ranks` ranks of this machine gets the GPU of its number; `cuda:N` puts all of them on one GPU.
    """
    if name in ("auto", "cuda") and torch.cuda.is_available():
        devices = torch.cuda.device_count()
        if local_ranks > devices:
            raise StartupError(
                f"device {name}: {local_ranks} ranks (tp x pp) need a GPU each and this machine has {devices}; "
                "lower --tp or --pp, use --device cpu, or name one GPU for all of them (--device cuda:0; slow, for "
                "tests)"
            )
        return torch.device("cuda", local_rank)
    if name == "auto":
        return torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise StartupError(f"device {name}: this machine has no usable CUDA device; use --device cpu")
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise StartupError(f"device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`; for the host, within the limits of the container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limited = cgroup_free_bytes()
    return _machine_free_bytes() if limited is None else min(limited, _machine_free_bytes())


def _machine_free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise StartupError("/proc/meminfo has no MemAvailable line: cannot tell how much memory is free")
