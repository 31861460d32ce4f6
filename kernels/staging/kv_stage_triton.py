"""Triton kernel of kv_stage.py: one program copies a few tokens of one (layer, plane, head), in either direction."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

_WORDS_PER_PROGRAM = 2048
"""16 KiB of 8-byte words: eight 16-byte accesses for each of 128 threads."""


@triton.jit(do_not_specialize=["start", "tokens", "layer_start", "head_start", "planes", "heads"])
def _kv_stage(
    pool_ptr,
    block_ptr,
    pages_ptr,
    start,
    tokens,
    layer_start,
    head_start,
    planes,
    heads,
    page_stride,
    layer_stride,
    plane_stride,
    head_stride,
    token_stride,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Strides are in units of UNIT words, so that the compiler knows the alignment of every address."""
    program = tl.program_id(0)
    token_blocks = tl.cdiv(tokens, BLOCK_TOKENS)
    row = program // token_blocks
    token = (program % token_blocks) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = token < tokens
    head = (head_start + row % heads).to(tl.int64)
    plane = (row // heads % planes).to(tl.int64)
    layer = (layer_start + row // heads // planes).to(tl.int64)
    position = start + token
    page = tl.load(pages_ptr + position // PAGE, mask=inside, other=0).to(tl.int64)
    slot = page * page_stride + layer * layer_stride + plane * plane_stride + head * head_stride
    slot += (position % PAGE).to(tl.int64) * token_stride
    word = tl.arange(0, BLOCK_WORDS)[None, :]
    mask = inside[:, None] & (word < ROW_WORDS)
    in_pool = pool_ptr + (slot * UNIT)[:, None] + word
    in_block = block_ptr + ((row.to(tl.int64) * tokens + token) * ROW_WORDS)[:, None] + word
    if GATHER:
        tl.store(in_block, tl.load(in_pool, mask=mask), mask=mask)
    else:
        tl.store(in_pool, tl.load(in_block, mask=mask), mask=mask)


def launch_kv_stage(
    pool: torch.Tensor,
    pages: torch.Tensor,
    block: torch.Tensor,
    start: int,
    end: int,
    layers: range,
    heads: range,
    *,
    gather: bool,
) -> None:
    """`pool` and `block` are integers of one width, which divides all strides."""
    _, _, planes, _, page_size, row_words = pool.shape
    aligned = [row_words * 8, pool.data_ptr(), block.data_ptr(), *(8 * stride for stride in pool.stride()[:-1])]
    unit = 2 if pool.element_size() == 8 and not any(span % 16 for span in aligned) else 1
    block_words = triton.next_power_of_2(row_words)
    # independent of the number of tokens: one kernel per pool, so that a small part does not wait for a compilation
    block_tokens = max(1, _WORDS_PER_PROGRAM // block_words)
    rows = len(layers) * planes * len(heads)
    _kv_stage[(rows * triton.cdiv(end - start, block_tokens),)](
        pool,
        block,
        pages,
        start,
        end - start,
        layers.start,
        heads.start,
        planes,
        len(heads),
        *(stride // unit for stride in pool.stride()[:-1]),
        PAGE=page_size,
        UNIT=unit,
        ROW_WORDS=row_words,
        BLOCK_WORDS=block_words,
        BLOCK_TOKENS=block_tokens,
        GATHER=gather,
        num_warps=4,
    )
