"""Triton kernel of latent_write.py: a program has one token and one of the parts of its row."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from ..backends.overlap_triton import overlap_options, start_next, wait_for_previous
from .fp8_rows import EXPONENT, EXPONENT_OF_448, ROUND_UP, SMALLEST, TWICE_BIAS
from .key_write import KeyWrite
from .packed_rows_triton import store_packed

_SMALLEST = tl.constexpr(SMALLEST)
_ROUND_UP = tl.constexpr(ROUND_UP)
_EXPONENT = tl.constexpr(EXPONENT)
_EXPONENT_OF_448 = tl.constexpr(EXPONENT_OF_448)
_TWICE_BIAS = tl.constexpr(TWICE_BIAS)


@triton.jit
def fp8_scale(largest):
    """The scale of rows whose largest absolute value, float32, this is, and its reciprocal; see fp8_rows.py."""
    bits = tl.maximum(largest, _SMALLEST).to(tl.int32, bitcast=True)
    bits = ((bits + _ROUND_UP) & _EXPONENT) - _EXPONENT_OF_448
    return bits.to(tl.float32, bitcast=True), (-bits + _TWICE_BIAS).to(tl.float32, bitcast=True)


@triton.jit
def rotate_pair(x1, x2, cos, sin, dtype):
    """Rotate a pair of float32 coordinates, with the roundings of rotate_reference."""
    rotated1 = (x1 * cos).to(dtype).to(tl.float32) - (x2 * sin).to(dtype).to(tl.float32)
    rotated2 = (x2 * cos).to(dtype).to(tl.float32) + (x1 * sin).to(dtype).to(tl.float32)
    return rotated1.to(dtype), rotated2.to(dtype)


@triton.jit
def _rms_normed(x_ptr, norm_ptr, column, eps, SIZE: tl.constexpr):
    """rms_norm of the SIZE elements at x_ptr, in their dtype; zero from SIZE on."""
    inside = column < SIZE
    x = tl.load(x_ptr + column, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return (normed.to(x.dtype).to(tl.float32) * weight).to(x.dtype)


@triton.jit
def _latent_write(
    x_ptr,
    q_norm_ptr,
    kv_norm_ptr,
    key_norm_ptr,
    key_bias_ptr,
    cos_ptr,
    sin_ptr,
    pages_ptr,
    rows_ptr,
    key_pages_ptr,
    key_rows_ptr,
    key_scales_ptr,
    out_ptr,
    x_stride,
    cos_stride,
    page_stride,
    slot_stride,
    key_page_stride,
    key_slot_stride,
    scale_page_stride,
    scale_slot_stride,
    eps,
    Q: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    KV: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    KEY: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_PAGE: tl.constexpr,
    PACKED: tl.constexpr,
    FP8_KEYS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        start_next()
        wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    x_ptr += token * x_stride
    dtype = out_ptr.dtype.element_ty
    if part == 0:
        column = tl.arange(0, BLOCK_Q)
        tl.store(out_ptr + token * Q + column, _rms_normed(x_ptr, q_norm_ptr, column, eps, Q), mask=column < Q)
        return
    pair = tl.arange(0, BLOCK_HALF)
    in_half = pair < HALF
    cos = tl.load(cos_ptr + token * cos_stride + pair, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * cos_stride + HALF + pair, mask=in_half, other=0.0).to(tl.float32)
    if part == 1:
        row = tl.load(rows_ptr + token)
        if row >= 0:
            place = pages_ptr + (row // PAGE).to(tl.int64) * page_stride + (row % PAGE).to(tl.int64) * slot_stride
            column = tl.arange(0, BLOCK_KV)
            latent = _rms_normed(x_ptr + Q, kv_norm_ptr, column, eps, KV)
            turning = x_ptr + Q + KV + 2 * pair
            x1 = tl.load(turning, mask=in_half, other=0.0).to(tl.float32)
            x2 = tl.load(turning + 1, mask=in_half, other=0.0).to(tl.float32)
            rotated1, rotated2 = rotate_pair(x1, x2, cos, sin, dtype)
            if PACKED:
                store_packed(place, latent, rotated1, rotated2, pair, KV, BLOCK_KV, HALF)
            else:
                tl.store(place + column, latent, mask=column < KV)
                tl.store(place + KV + pair, rotated1, mask=in_half)
                tl.store(place + KV + HALF + pair, rotated2, mask=in_half)
    elif KEY > 0:
        row = tl.load(key_rows_ptr + token)
        if row >= 0:
            place = key_pages_ptr + (row // KEY_PAGE).to(tl.int64) * key_page_stride
            place += (row % KEY_PAGE).to(tl.int64) * key_slot_stride
            x_ptr += Q + KV + 2 * HALF
            column = tl.arange(0, BLOCK_KEY)
            inside = column < KEY
            x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
            mean = tl.sum(x) / KEY
            centred = tl.where(inside, x - mean, 0.0)
            inverse = tl.rsqrt(tl.sum(centred * centred) / KEY + eps)
            weight = tl.load(key_norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
            bias = tl.load(key_bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
            normed = (centred * inverse * weight + bias).to(dtype)
            first = 2 * pair if INTERLEAVED else pair
            step: tl.constexpr = 1 if INTERLEAVED else HALF
            x1 = tl.load(x_ptr + first, mask=in_half, other=0.0).to(tl.float32) - mean
            x2 = tl.load(x_ptr + first + step, mask=in_half, other=0.0).to(tl.float32) - mean
            weight1 = tl.load(key_norm_ptr + first, mask=in_half, other=0.0).to(tl.float32)
            weight2 = tl.load(key_norm_ptr + first + step, mask=in_half, other=0.0).to(tl.float32)
            bias1 = tl.load(key_bias_ptr + first, mask=in_half, other=0.0).to(tl.float32)
            bias2 = tl.load(key_bias_ptr + first + step, mask=in_half, other=0.0).to(tl.float32)
            x1 = (x1 * inverse * weight1 + bias1).to(dtype).to(tl.float32)
            x2 = (x2 * inverse * weight2 + bias2).to(dtype).to(tl.float32)
            rotated1, rotated2 = rotate_pair(x1, x2, cos, sin, dtype)
            plain = inside & (column >= 2 * HALF)
            if FP8_KEYS:
                turned = tl.maximum(tl.abs(rotated1.to(tl.float32)), tl.abs(rotated2.to(tl.float32)))
                unturned = tl.where(plain, tl.abs(normed.to(tl.float32)), 0.0)
                scale, inverse_scale = fp8_scale(tl.maximum(tl.max(turned), tl.max(unturned)))
                scales = key_scales_ptr + (row // KEY_PAGE).to(tl.int64) * scale_page_stride
                tl.store(scales + (row % KEY_PAGE) * scale_slot_stride, scale)
                normed = (normed.to(tl.float32) * inverse_scale).to(tl.float8e4nv)
                rotated1 = (rotated1.to(tl.float32) * inverse_scale).to(tl.float8e4nv)
                rotated2 = (rotated2.to(tl.float32) * inverse_scale).to(tl.float8e4nv)
            tl.store(place + column, normed, mask=plain)
            tl.store(place + pair, rotated1, mask=in_half)
            tl.store(place + HALF + pair, rotated2, mask=in_half)


def launch_latent_write(
    x: torch.Tensor,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    pages: torch.Tensor,
    rows: torch.Tensor,
    eps: float,
    key: KeyWrite | None,
    out: torch.Tensor,
) -> None:
    """Fill `out` [T, Q]; write rows and keys."""
    half = cos.shape[1] // 2
    key_size = 0 if key is None else len(key.norm)
    _latent_write[(len(x), 2 if key is None else 3)](
        x,
        q_norm,
        kv_norm,
        None if key is None else key.norm,
        None if key is None else key.bias,
        cos,
        signed_sin,
        pages,
        rows,
        None if key is None else key.pages,
        None if key is None else key.rows,
        None if key is None else key.scales,
        out,
        x.stride(0),
        cos.stride(0),
        *pages.stride()[:2],
        *((0, 0) if key is None else key.pages.stride()[:2]),
        *((0, 0) if key is None or key.scales is None else key.scales.stride()),
        eps,
        Q=len(q_norm),
        BLOCK_Q=triton.next_power_of_2(len(q_norm)),
        KV=len(kv_norm),
        BLOCK_KV=triton.next_power_of_2(len(kv_norm)),
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        KEY=key_size,
        BLOCK_KEY=triton.next_power_of_2(max(key_size, 1)),
        INTERLEAVED=key is not None and key.interleaved,
        PAGE=pages.shape[1],
        KEY_PAGE=1 if key is None else key.pages.shape[1],
        PACKED=pages.dtype == torch.uint8,
        FP8_KEYS=key is not None and key.scales is not None,
        num_warps=4,
        **overlap_options(x.device),
    )
