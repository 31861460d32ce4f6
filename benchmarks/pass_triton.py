"""One pass over a tensor, by a kernel that overlaps the end of the previous one, as the collectives of servers do."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from pdserve.kernels.backends.overlap_triton import overlap_options, start_next, wait_for_previous

_ELEMENTS = 1024


@triton.jit
def _pass(x_ptr, count, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        start_next()
        wait_for_previous()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < count), mask=at < count)


def launch_pass(x: torch.Tensor) -> None:
    """Read and write all of x, a contiguous tensor."""
    _pass[(triton.cdiv(x.numel(), _ELEMENTS),)](x, x.numel(), BLOCK=_ELEMENTS, num_warps=4, **overlap_options(x.device))
