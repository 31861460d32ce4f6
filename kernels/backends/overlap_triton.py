"""Programmatic dependent launch (sm_90 and later): a kernel's programs start while the previous kernel still runs.

A kernel that is launched with `overlap_options` must call `wait_for_previous` before it reads what earlier kernels
write or writes what they read. So it ends after all earlier kernels, and a kernel that waits for it waits for them,
too. `start_next` lets the next kernel start once every program of this one has called it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import Any

import torch
import triton
import triton.language as tl

from .occupancy import is_hopper_or_later


@triton.jit
def wait_for_previous():
    tl.extra.cuda.gdc_wait()


@triton.jit
def start_next():
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Load these lines into the L2 cache: for memory that no earlier kernel writes, before `wait_for_previous`."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def overlap_options(device: torch.device) -> dict[str, Any]:
    """Launch arguments: the kernel's OVERLAP, and the launch attribute that goes with it."""
    return {"OVERLAP": True, "launch_pdl": True} if is_hopper_or_later(device) else {"OVERLAP": False}
