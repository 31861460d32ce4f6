"""Triton kernel of mask_logits.py: one program per block of a row."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _mask_logits(logits_ptr, slots_ptr, masks_ptr, out_ptr, vocabulary, logits_stride, words, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    slot = tl.load(slots_ptr + row).to(tl.int64)
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=0.0)
    # a row without a mask reads none: all its bits are set
    word = tl.load(masks_ptr + slot * words + token // 32, mask=inside & (slot >= 0), other=-1)
    allowed = (word >> (token % 32)) & 1
    tl.store(out_ptr + row * vocabulary + token, tl.where(allowed != 0, logits, float("-inf")), mask=inside)


def launch_mask_logits(logits: torch.Tensor, slots: torch.Tensor, masks: torch.Tensor, out: torch.Tensor) -> None:
    rows, vocabulary = logits.shape
    grid = (rows, triton.cdiv(vocabulary, BLOCK))
    _mask_logits[grid](logits, slots, masks, out, vocabulary, logits.stride(0), masks.shape[1], BLOCK=BLOCK)
