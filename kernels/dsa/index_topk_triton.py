"""The fast implementation of index_topk.py: scores by Triton into a buffer, then the k best of each row by CUDA.

Work is distributed over the GPU without the host knowing the lengths of sequences. With many tokens, a program
processes four adjacent tokens and every n-th block of the keys that they see (`_index_scores`); it reads a block once
for all its tokens of a sequence. Two programs fit on an SM: one multiplies while the other adds over heads. In a decode
step, blocks are numbered across the batch, and every program gets an equal share of them, of one token or of a few
adjacent tokens (`_index_scores_of_few`). For 20 tokens that see 34,500 keys each, this takes 50 us instead of 57;
reading the keys alone takes 42 us (H200, bfloat16).

Keys are the rows of the matrix products and heads the columns, so that the sum over heads stays within a few threads.
The buffer has 4 bytes for each key of 256 bytes (132 bytes in fp8), and mostly stays in the L2 cache between the two
kernels.

Scales of fp8 keys are read one block ahead, and the page ids that locate them two blocks ahead, so products never wait
for them. Scales of fp8 queries are multiplied with the weights once per program.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...common.arithmetic import ceil_div, round_up
from ..attention.page_rows_triton import load_page_rows
from ..backends.nvrtc import load_kernel
from ..backends.occupancy import multiprocessors
from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from .index_plan import IndexPlan, IndexScales, select_top_reference


class ScoreShape(NamedTuple):
    """The size of a program that computes scores: tokens that share a block of keys, keys of a block, and Triton's
    warps and stages.
    """

    tokens: int
    keys: int
    warps: int
    stages: int


CHUNK_SHAPES = {1: ScoreShape(4, 64, 4, 5), 2: ScoreShape(4, 64, 4, 3), 4: ScoreShape(1, 128, 4, 2)}
"""By bytes of an element. Because page ids are loaded first, five stages load two blocks ahead, and three load one
block ahead. float32 products take many registers.
"""
_STAGES_OF_FEW = {1: 5, 2: 3, 4: 2}
"""An fp8 block has half the bytes, so more blocks must be in flight."""
_KEYS_AT_ONCE = 128
_PROGRAMS_PER_SM = 8  # two run at a time; more balance sequences of different lengths
_FEW_TOKENS = 64
_PROGRAMS_PER_SM_OF_FEW = {1: 3, 2: 2, 4: 2}  # by bytes of an element: as many as fit
_BUFFER_BYTES = 256 << 20  # longer batches of queries are scored in parts
_SELECT_THREADS = 1024
_SCORES_PER_BLOCK = 16 * _SELECT_THREADS  # scores that a block of select_top holds in registers


@triton.jit(do_not_specialize=["tokens"])
def _index_scores(
    query_ptr,
    weights_ptr,
    key_ptr,
    query_scale_ptr,
    key_scale_ptr,
    table_ptr,
    sequence_ptr,
    visible_ptr,
    scores_ptr,
    query_stride,
    weights_stride,
    table_stride,
    page_stride,
    token_stride,
    scale_page_stride,
    scale_token_stride,
    scores_stride,
    k,
    tokens,
    BLOCK_T: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    visible = tl.load(visible_ptr + token, mask=token < tokens, other=0)
    visible = tl.where(visible > k, visible, 0)  # the others select all, whatever their scores
    sequence = tl.load(sequence_ptr + token, mask=token < tokens, other=-1)
    if OVERLAP:  # the plan was written before this step; queries and the newest keys were not
        wait_for_previous()
    # one row per token and head
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    row_token, head = tl.program_id(0) * BLOCK_T + row // BLOCK_H, row % BLOCK_H
    column = tl.arange(0, BLOCK_D)
    is_head = (row_token < tokens) & (head < HEADS)
    rows = query_ptr + row_token.to(tl.int64)[:, None] * query_stride + head[:, None] * D + column[None, :]
    query = tl.load(rows, mask=is_head[:, None] & (column < D)[None, :], other=0.0)
    weight = tl.load(weights_ptr + row_token.to(tl.int64) * weights_stride + head, mask=is_head, other=0.0)
    if FP8:
        weight *= tl.load(query_scale_ptr + row_token.to(tl.int64) * HEADS + head, mask=is_head, other=0.0)
    scores = scores_ptr + token.to(tl.int64)[None, :] * scores_stride
    current = tl.max(tl.where(visible > 0, sequence, -1), 0)
    while current >= 0:  # usually the only sequence of these tokens
        limit = tl.where(sequence == current, visible, 0)
        pages = table_ptr + current.to(tl.int64) * table_stride
        end = tl.max(limit, 0)
        begin, step = tl.program_id(1) * BLOCK, tl.num_programs(1) * BLOCK
        if FP8:
            page = _load_pages(pages, begin, end, PAGE, BLOCK)
            scale = _load_scales(page, key_scale_ptr, begin, end, scale_page_stride, scale_token_stride, PAGE, BLOCK)
            page = _load_pages(pages, begin + step, end, PAGE, BLOCK)
        for first in range(begin, end, step):
            if FP8:
                next_scale = _load_scales(
                    page, key_scale_ptr, first + step, end, scale_page_stride, scale_token_stride, PAGE, BLOCK
                )
                page = _load_pages(pages, first + 2 * step, end, PAGE, BLOCK)
            key = load_page_rows(pages, key_ptr, first, end, page_stride, token_stride, column, D, PAGE, BLOCK)
            product = tl.dot(key, tl.trans(query), input_precision=PRECISION)
            weighted = tl.maximum(product, 0.0) * weight[None, :]
            score = tl.sum(tl.reshape(weighted, (BLOCK, BLOCK_T, BLOCK_H)), 2)
            if FP8:
                score *= scale[:, None]
                scale = next_scale
            position = first + tl.arange(0, BLOCK)[:, None]
            tl.store(scores + position, score, mask=position < limit[None, :])
        current = tl.max(tl.where((visible > 0) & (sequence < current), sequence, -1), 0)


@triton.jit(do_not_specialize=["tokens"])
def _index_scores_of_few(
    query_ptr,
    weights_ptr,
    key_ptr,
    query_scale_ptr,
    key_scale_ptr,
    table_ptr,
    sequence_ptr,
    visible_ptr,
    scores_ptr,
    query_stride,
    weights_stride,
    table_stride,
    page_stride,
    token_stride,
    scale_page_stride,
    scale_token_stride,
    scores_stride,
    k,
    tokens,
    BLOCK_T: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
    number = tl.arange(0, BLOCK_T)
    seen = tl.load(visible_ptr + number, mask=number < tokens, other=0)
    seen = tl.where(seen > k, seen, 0)  # the others select all, whatever their scores
    ends = tl.cumsum((seen + BLOCK - 1) // BLOCK, 0)  # end of each token's blocks, numbered across the batch
    blocks = tl.max(ends, 0)
    share = (blocks + tl.num_programs(0) - 1) // tl.num_programs(0)
    at = tl.program_id(0) * share
    end = tl.minimum(at + share, blocks)
    head = tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    inside = (head < HEADS)[:, None] & (column < D)[None, :]
    if OVERLAP:  # the plan was written before this step; queries and the newest keys were not
        wait_for_previous()
    while at < end:
        token = tl.sum((ends <= at).to(tl.int32), 0).to(tl.int64)
        start = tl.max(tl.where(ends <= at, ends, 0), 0)
        until = tl.minimum(tl.min(tl.where(ends > at, ends, blocks), 0), end)
        visible = tl.load(visible_ptr + token)
        pages = table_ptr + tl.load(sequence_ptr + token).to(tl.int64) * table_stride
        query = tl.load(query_ptr + token * query_stride + head[:, None] * D + column[None, :], mask=inside, other=0.0)
        weight = tl.load(weights_ptr + token * weights_stride + head, mask=head < HEADS, other=0.0)
        if FP8:
            weight *= tl.load(query_scale_ptr + token * HEADS + head, mask=head < HEADS, other=0.0)
            begin = (at - start) * BLOCK
            page = _load_pages(pages, begin, visible, PAGE, BLOCK)
            scale = _load_scales(
                page, key_scale_ptr, begin, visible, scale_page_stride, scale_token_stride, PAGE, BLOCK
            )
            page = _load_pages(pages, begin + BLOCK, visible, PAGE, BLOCK)
        scores = scores_ptr + token * scores_stride
        for block in range(at - start, until - start):
            first = block * BLOCK
            if FP8:
                next_scale = _load_scales(
                    page, key_scale_ptr, first + BLOCK, visible, scale_page_stride, scale_token_stride, PAGE, BLOCK
                )
                page = _load_pages(pages, first + 2 * BLOCK, visible, PAGE, BLOCK)
            key = load_page_rows(pages, key_ptr, first, visible, page_stride, token_stride, column, D, PAGE, BLOCK)
            product = tl.dot(key, tl.trans(query), input_precision=PRECISION)
            score = tl.sum(tl.maximum(product, 0.0) * weight[None, :], 1)
            if FP8:
                score *= scale
                scale = next_scale
            position = first + tl.arange(0, BLOCK)
            tl.store(scores + position, score, mask=position < visible)
        at = until


@triton.jit
def _load_pages(pages, first, end, PAGE, BLOCK):
    """The page ids of positions [first, first + BLOCK); 0 from `end` on."""
    position = first + tl.arange(0, BLOCK)
    return tl.load(pages + position // PAGE, mask=position < end, other=0).to(tl.int64)


@triton.jit
def _load_scales(page, scale_ptr, first, end, page_stride, token_stride, PAGE, BLOCK):
    """The scales of the keys at positions [first, first + BLOCK), which are in these pages; 0 from `end` on."""
    position = first + tl.arange(0, BLOCK)
    places = scale_ptr + page * page_stride + (position % PAGE) * token_stride
    return tl.load(places, mask=position < end, other=0.0)


def launch_index_topk(
    query: torch.Tensor,
    weights: torch.Tensor,
    key_pages: torch.Tensor,
    plan: IndexPlan,
    scales: IndexScales | None,
    rows_of: IndexPlan | None,
    out: torch.Tensor,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Fill `out` [T, k]; call `meanwhile` before the last selection."""
    tokens, k = out.shape
    width = round_up(plan.max_visible, _KEYS_AT_ONCE)
    at_once = min(max(_BUFFER_BYTES // (4 * width), 1), tokens)
    buffer = torch.empty(at_once, width, dtype=torch.float32, device=query.device)
    for start in range(0, tokens, at_once):
        rows = slice(start, min(start + at_once, tokens))
        part = plan.part(rows)
        scores = buffer[: part.tokens]
        of_rows = None if scales is None else IndexScales(scales.query[rows], scales.keys)
        launch_scores(query[rows], weights[rows], key_pages, part, of_rows, scores, k)
        if meanwhile is not None and rows.stop == tokens:
            meanwhile()
        launch_select_top(scores, part.visible, out[rows], rows_of and rows_of.part(rows))


def launch_scores(
    query: torch.Tensor,
    weights: torch.Tensor,
    key_pages: torch.Tensor,
    plan: IndexPlan,
    scales: IndexScales | None,
    scores: torch.Tensor,
    k: int,
) -> None:
    """Write the scores of the visible keys of tokens that see more than k, and nothing else, to `scores`."""
    tokens, heads, dim = query.shape
    device = query.device
    page_stride, _, token_stride, _ = key_pages.stride()
    sms = multiprocessors(device)
    if tokens <= _FEW_TOKENS:
        launch = _index_scores_of_few[(_PROGRAMS_PER_SM_OF_FEW[query.dtype.itemsize] * sms,)]
        stages = _STAGES_OF_FEW[query.dtype.itemsize]
        shape = ScoreShape(triton.next_power_of_2(tokens), _KEYS_AT_ONCE, warps=4, stages=stages)
    else:
        shape = CHUNK_SHAPES[query.dtype.itemsize]
        groups = ceil_div(tokens, shape.tokens)
        launch = _index_scores[(groups, min(ceil_div(_PROGRAMS_PER_SM * sms, groups), scores.shape[1] // shape.keys))]
    launch(
        query,
        weights,
        key_pages,
        None if scales is None else scales.query,
        None if scales is None else scales.keys,
        plan.page_table,
        plan.sequence,
        plan.visible,
        scores,
        query.stride(0),
        weights.stride(0),
        plan.page_table.stride(0),
        page_stride,
        token_stride,
        *((0, 0) if scales is None else (scales.keys.stride(0), scales.keys.stride(2))),
        scores.stride(0),
        k,
        tokens,
        BLOCK_T=shape.tokens,
        HEADS=heads,
        BLOCK_H=max(triton.next_power_of_2(heads), 16),
        D=dim,
        BLOCK_D=max(triton.next_power_of_2(dim), 16 if scales is None else 32),  # the least of a matrix product
        PAGE=plan.page_size,
        BLOCK=shape.keys,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",  # tf32 would round float32 to 10 bits
        FP8=scales is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **overlap_options(device),
    )


def blocks_per_row(rows: int, width: int, sms: int) -> int:
    """Blocks per row of `width` scores: 2 or 4 if fewer cannot hold it and all rows can run at once.

    The blocks of a row run within one GPC, so with four not every SM can have one: 24 rows of 65,536 scores
    run at once (17 us; 26 with two blocks each), 32 do not (28 us; H200).
    """
    for blocks, room in ((4, sms * 3 // 4), (2, sms)):
        if width > blocks // 2 * _SCORES_PER_BLOCK and blocks * rows <= room:
            return blocks
    return 1


def launch_select_top(
    scores: torch.Tensor, visible: torch.Tensor, out: torch.Tensor, rows_of: IndexPlan | None = None
) -> None:
    """Fill `out` [T, k] with the positions of the k best of the first visible[t] scores [T, width] of each row, or
    with their flat rows by the pages of `rows_of`.
    """
    if out.device.type != "cuda":  # with Triton's interpreter: CUDA has none
        positions = select_top_reference(scores, visible, out.shape[1])
        out.copy_(positions if rows_of is None else rows_of.flat_rows(positions))
        return
    cluster = 1
    if torch.cuda.get_device_capability(out.device) >= (9, 0):
        cluster = blocks_per_row(len(out), scores.shape[1], multiprocessors(out.device))
    page_size = 0 if rows_of is None else rows_of.page_size
    constants = (("THREADS", _SELECT_THREADS), ("CLUSTER", cluster), ("PAGE", page_size))
    pages, sequence = (visible, visible) if rows_of is None else (rows_of.page_table, rows_of.sequence)  # or not read
    load_kernel("dsa/select_top.cu", "select_top", out.device, constants).launch(
        scores.data_ptr(),
        scores.stride(0),
        visible.data_ptr(),
        pages.data_ptr(),
        pages.stride(0),
        sequence.data_ptr(),
        out.shape[1],
        out.data_ptr(),
        blocks=cluster * len(out),
        threads=_SELECT_THREADS,
        overlap_previous=True,
    )
