"""Unpacks 4-bit values from bytes in Triton: integers, and E2M1 numbers of MXFP4."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

# With a constant high byte, a value in the low byte is a 16-bit float: 128 + value in bfloat16 (0x43), 1024 + value in
# float16 (0x64). So one `prmt`, which composes bytes, converts two values; integer conversions would take longer than
# reading the values from memory. Subtracting 128 + zero (or 1024 + zero) is exact.
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
# `&`: outputs are written before all inputs are read, so none of them may share a register with an input.
_CONSTRAINTS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r")

# The four bits of an E2M1 number (sign, 2 of exponent, 1 of mantissa) at these places of a 16-bit float give the number
# times a power of two, 2^-126 in bfloat16 and 2^-14 in float16, also for the subnormal 0.5: `factor` is its inverse.
# `prmt` makes each byte the upper half of 16 bits, where its high four bits have the sign in place.
_E2M1_ASM = """{{
    .reg .b32 first, second, part, factor, zero;
    mov.b32 factor, {factor};
    mov.b32 zero, 0x80008000;
    prmt.b32 first, $4, 0, 0x1404;
    prmt.b32 second, $4, 0, 0x3424;
    shr.b32 part, first, {shift};
    and.b32 part, part, {mask};
    and.b32 $2, first, 0x80008000;
    or.b32 $2, $2, part;
    shr.b32 part, second, {shift};
    and.b32 part, part, {mask};
    and.b32 $3, second, 0x80008000;
    or.b32 $3, $3, part;
    shl.b32 first, first, 4;
    shl.b32 second, second, 4;
    shr.b32 part, first, {shift};
    and.b32 part, part, {mask};
    and.b32 $0, first, 0x80008000;
    or.b32 $0, $0, part;
    shr.b32 part, second, {shift};
    and.b32 part, part, {mask};
    and.b32 $1, second, 0x80008000;
    or.b32 $1, $1, part;
    fma.rn.{type} $0, $0, factor, zero;
    fma.rn.{type} $1, $1, factor, zero;
    fma.rn.{type} $2, $2, factor, zero;
    fma.rn.{type} $3, $3, factor, zero;
    }}"""
_BFLOAT16_E2M1_ASM = tl.constexpr(_E2M1_ASM.format(shift=6, mask="0x01c001c0", type="bf16x2", factor="0x7e807e80"))
_FLOAT16_E2M1_ASM = tl.constexpr(_E2M1_ASM.format(shift=3, mask="0x0e000e00", type="f16x2", factor="0x74007400"))
_E2M1_CONSTRAINTS = tl.constexpr("=r,=r,=r,=r,r")


@triton.jit
def unpack(packed, low_zeros, high_zeros):
    """The values in the low and in the high halves of bytes [m, n], minus their zeros [n], in the zeros' dtype."""
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


@triton.jit
def unpack_e2m1(packed, dtype: tl.constexpr):
    """The E2M1 numbers in the low and in the high halves of bytes, in `dtype`."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _BFLOAT16_E2M1_ASM,
            _E2M1_CONSTRAINTS,
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif dtype == tl.float16:  # noqa: RET505 - the other branches are not compiled
        return tl.inline_asm_elementwise(
            _FLOAT16_E2M1_ASM,
            _E2M1_CONSTRAINTS,
            [packed],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        return e2m1(packed & 15), e2m1(packed >> 4)


@triton.jit
def factors(scales, MXFP4: tl.constexpr):
    """Scales in float32. A scale of MXFP4 is the exponent of a float32; 0 becomes 0.0 instead of 2^-127."""
    if MXFP4:
        return (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 - the other branch is not compiled
        return scales.to(tl.float32)


@triton.jit
def e2m1(value):
    """E2M1 numbers in float32, computed as a multiple of 0.5."""
    bits = value.to(tl.int32)
    mantissa, exponent = bits & 1, (bits >> 1) & 3
    halves = tl.where(exponent > 0, (2 + mantissa) << tl.maximum(exponent - 1, 0), mantissa)
    return tl.where(bits >= 8, -halves, halves).to(tl.float32) * 0.5
