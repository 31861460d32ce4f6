"""Takes 4-bit values out of bytes, in Triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

# A byte below a constant high byte is a 16-bit float whose last bit is worth 1: 128 + value in bfloat16 (0x43),
# 1024 + value in float16 (0x64). So `prmt`, which composes bytes, converts two values; an integer conversion takes
# longer than reading the values from memory. Subtracting 128 + zero (or 1024 + zero) is exact.
_ASM = """{{
    .reg .b32 low, high, one;
    mov.b32 one, {one};
    and.b32 low, $4, 0x0f0f0f0f;
    shr.b32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;
    prmt.b32 $0, low, {byte}, 0x4140;
    prmt.b32 $1, low, {byte}, 0x4342;
    prmt.b32 $2, high, {byte}, 0x4140;
    prmt.b32 $3, high, {byte}, 0x4342;
    fma.rn.{type} $0, $0, one, $5;
    fma.rn.{type} $1, $1, one, $6;
    fma.rn.{type} $2, $2, one, $7;
    fma.rn.{type} $3, $3, one, $8;
    }}"""
_BFLOAT16_ASM = tl.constexpr(_ASM.format(byte="0x43434343", type="bf16x2", one="0x3f803f80"))
_FLOAT16_ASM = tl.constexpr(_ASM.format(byte="0x64646464", type="f16x2", one="0x3c003c00"))
_CONSTRAINTS = tl.constexpr("=r,=r,=r,=r,r,r,r,r,r")


@triton.jit
def unpack(packed, low_zeros, high_zeros):
    """The values in the low and in the high halves of bytes [m, n], minus zeros [n] of each, in the dtype of these."""
    dtype: tl.constexpr = low_zeros.dtype
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _BFLOAT16_ASM,
            _CONSTRAINTS,
            [packed, _negated(low_zeros, packed, 128.0), _negated(high_zeros, packed, 128.0)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif dtype == tl.float16:  # noqa: RET505 - the other branches are not compiled
        return tl.inline_asm_elementwise(
            _FLOAT16_ASM,
            _CONSTRAINTS,
            [packed, _negated(low_zeros, packed, 1024.0), _negated(high_zeros, packed, 1024.0)],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        return (packed & 15).to(dtype) - low_zeros[None, :], (packed >> 4).to(dtype) - high_zeros[None, :]


@triton.jit
def _negated(zeros, like, offset: tl.constexpr):
    return tl.broadcast_to((-offset - zeros.to(tl.float32)).to(zeros.dtype)[None, :], like.shape)
