"""Common parts of the attention kernels: read rows of a sequence from its pages, add sinks to an online softmax."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def add_sinks(acc, top, total, sink_ptrs, mask):
    """Finish an online softmax over scores in base 2 with the sink of each row: one more score, without a value."""
    sink = tl.load(sink_ptrs, mask=mask, other=0.0) * 1.4426950408889634  # log2(e)
    new_top = tl.maximum(top, sink)
    shrink = tl.exp2(top - new_top)
    return acc * shrink[:, None], total * shrink + tl.exp2(sink - new_top)


@triton.jit
def load_page_rows(pages_ptr, base_ptr, first, limit, page_stride, token_stride, column, D, PAGE, BLOCK):
    """Rows [first, first + BLOCK) of one head of a sequence's keys or values; zero from `limit` and from D on.

    Keys and values look up their pages separately: with one lookup for both, a decode step at 64k context took 7.6
    instead of 6.9 ms (H200, Qwen3-8B), presumably because it stalls the pipeline of loads.
    """
    token = first + tl.arange(0, BLOCK)
    inside = token < limit
    page = tl.load(pages_ptr + token // PAGE, mask=inside, other=0).to(tl.int64)
    rows = base_ptr + page[:, None] * page_stride + (token % PAGE)[:, None] * token_stride + column[None, :]
    return tl.load(rows, mask=inside[:, None] & (column < D)[None, :], other=0.0)
