"""Which implementation of an operation runs: Triton on CUDA tensors, plain torch everywhere else."""

from typing import Literal

import torch

Impl = Literal["auto", "reference", "triton"]


def use_triton(impl: Impl, device: torch.device) -> bool:
    """`auto` is Triton on CUDA and the reference elsewhere; raises ValueError for a name that is none of ours.

    "triton" on another device is taken at its word: it works where Triton interprets (TRITON_INTERPRET=1).
    """
    if impl == "auto":
        return device.type == "cuda"
    if impl not in ("reference", "triton"):
        raise ValueError(f"impl must be auto, reference or triton, got {impl!r}")
    return impl == "triton"
