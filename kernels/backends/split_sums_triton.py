"""Split-K: several programs divide the columns of a product. Each stores its part of the sums, and the last program to
finish adds all parts in a fixed order.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def store_part(acc, sums_ptr, counters_ptr, block, part, parts, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Store part number `part` of block number `block`; returns whether all parts are stored now. The counter of the
    block is 0 before its first and after its last part.
    """
    tl.store(_elements(sums_ptr, block * parts + part, HEIGHT, WIDTH), acc)
    tl.debug_barrier()  # all threads have stored before one of them counts
    complete = tl.atomic_add(counters_ptr + block, 1, sem="acq_rel") == parts - 1
    if complete:
        tl.store(counters_ptr + block, 0)
    return complete


@triton.jit
def add_parts(sums_ptr, block, parts, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The sum of all parts of a block, after `store_part` has returned true."""
    at_once: tl.constexpr = max(1, min(8, 8192 // (HEIGHT * WIDTH)))  # as many as fit in registers
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for first in range(0, parts, at_once):
        for part in tl.static_range(at_once):  # unrolled, so that the loads do not wait for one another
            place = _elements(sums_ptr, block * parts + first + part, HEIGHT, WIDTH)
            # bypasses the L1 cache: other multiprocessors have written the parts
            total += tl.load(place, mask=first + part < parts, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _elements(sums_ptr, number, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    element = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return sums_ptr + number * (HEIGHT * WIDTH) + element
