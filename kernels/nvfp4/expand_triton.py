"""Triton kernel that expands weights in NVFP4 (nvfp4.py): a program has some rows and one step of columns."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ...common.arithmetic import ceil_div
from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from ..packed4.unpack_triton import e2m1
from .nvfp4 import GROUP, WORD, Nvfp4Matrix

_GROUP = tl.constexpr(GROUP)
_WORD = tl.constexpr(WORD)
_SHIFT = tl.constexpr(256.0)
"""Values times scales are divided by this, so that they are in the range of float16."""

# As in csrc/nvfp4/nvfp4_format.cuh: shifted bits of a word are pairs of values times a power of two, and the scale
# includes its inverse.
_PAIRS = ("mov.b32 pair, $8;", "shl.b32 pair, $8, 6;", "shf.r.wrap.b32 pair, $8, $8, 4;", "shl.b32 pair, $8, 2;")
_LAST = "and.b32 pair, pair, 0x80c080c0; shr.u32 part, $8, 6; and.b32 part, part, 0x01000100; or.b32 pair, pair, part;"
_TO_FLOAT16 = """
    and.b32 part, pair, 0x01c001c0;
    shl.b32 part, part, 3;
    and.b32 pair, pair, 0x80008000;
    or.b32 pair, pair, part;"""


def _asm(kind: str, to_kind: str = "") -> str:
    code = "{ .reg .b32 pair, part, zero; mov.b32 zero, 0x80008000;"
    for number, shift in enumerate(_PAIRS):
        code += f"""
    {shift}
    {"and.b32 pair, pair, 0x81c081c0;" if number < len(_PAIRS) - 1 else _LAST}{to_kind}
    fma.rn.{kind} pair, pair, $9, zero;
    mov.b32 {{${2 * number}, ${2 * number + 1}}}, pair;"""
    return code + "}"


_BFLOAT16_ASM, _FLOAT16_ASM = tl.constexpr(_asm("bf16x2")), tl.constexpr(_asm("f16x2", _TO_FLOAT16))
_CONSTRAINTS = tl.constexpr("=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r")


@triton.jit
def _sixteen_bits(words, codes, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASM,
        _CONSTRAINTS,
        [words, codes * 0x10001],
        dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _value(words, scales, MANTISSA: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr, SIGN: tl.constexpr):
    """A value times its scale in float32, from its bits of words."""
    bits = (words >> MANTISSA & 1) | (words >> LOWER & 1) << 1 | (words >> UPPER & 1) << 2 | (words >> SIGN & 1) << 3
    return e2m1(bits) * scales


@triton.jit
def _unpack(words, codes, dtype: tl.constexpr):
    """Values times scales divided by `_SHIFT` [n, 8 * words], from words [n, words] and the codes of their scales."""
    if dtype == tl.bfloat16:
        a, b, c, d, e, f, g, h = _sixteen_bits(words, codes << 4 | 0x7000, _BFLOAT16_ASM)
    elif dtype == tl.float16:
        a, b, c, d, e, f, g, h = _sixteen_bits(words, codes << 7, _FLOAT16_ASM)
    else:
        scales = (codes << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * (2.0**-14)
        a, b = _value(words, scales, 6, 7, 8, 15), _value(words, scales, 22, 23, 24, 31)
        c, d = _value(words, scales, 0, 1, 2, 9), _value(words, scales, 16, 17, 18, 25)
        e, f = _value(words, scales, 10, 11, 12, 19), _value(words, scales, 26, 27, 28, 3)
        g, h = _value(words, scales, 4, 5, 14, 13), _value(words, scales, 20, 21, 30, 29)
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    joined = tl.reshape(tl.join(even, odd), [words.shape[0], words.shape[1] * _WORD])
    return joined if dtype == tl.float32 else joined.to(dtype, bitcast=True)


@triton.jit
def _columns(place):
    """The column of the value at a place in a step."""
    group = place // _GROUP
    return group // 8 * 128 + group % 2 * 64 + group // 2 % 4 * 16 + place % _GROUP


@triton.jit
def _scale_places(word, STEP: tl.constexpr):
    """Where the scale of a word of a step is among the scales of the step."""
    group = word // (_GROUP // _WORD)
    return group // 2 % 4 * (STEP // 64) + group // 8 * 2 + group % 2


@triton.jit
def _expand(
    words_ptr,
    scales_ptr,
    factors_ptr,
    out_ptr,
    rows,
    columns,
    row_words,
    step_stride,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    step = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    number = tl.where(row < rows, row, 0)
    word = tl.arange(0, STEP // _WORD)
    words = tl.load(words_ptr + number.to(tl.int64)[:, None] * row_words + step * (STEP // _WORD) + word[None, :])
    scales = scales_ptr + step.to(tl.int64) * step_stride + number[:, None] * (STEP // _GROUP)
    codes = tl.load(scales + _scale_places(word, STEP)[None, :]).to(tl.int32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    wide = _unpack(words, codes, dtype).to(tl.float32) * (tl.load(factors_ptr + number) * _SHIFT)[:, None]
    column = step * STEP + _columns(tl.arange(0, STEP))
    out = out_ptr + number.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out, wide.to(dtype), mask=(row < rows)[:, None] & (column < columns)[None, :])


def launch_expand(weight: Nvfp4Matrix, out: torch.Tensor) -> None:
    """Fill `out` [rows, columns] with one matrix, which may be a range of rows of a larger one."""
    words, tile = weight.packed.view(torch.int32), 4096 // weight.step
    rows, row_words = words.shape
    _expand[(row_words * WORD // weight.step, ceil_div(rows, tile))](
        words,
        weight.scales,
        weight.factors,
        out,
        rows,
        weight.columns,
        row_words,
        weight.scales.stride(0),
        STEP=weight.step,
        ROWS=tile,
        num_warps=4,
        **overlap_options(out.device),
    )
