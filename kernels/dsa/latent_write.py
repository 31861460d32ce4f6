"""Converts the compressed input of a latent-attention layer to cache rows: norms, rotations, and writes into pages.

    q, c, r, k              =  the parts of x[t], k only where the layer has an indexer
    compressed[t]           =  rms_norm(q, q_norm)
    pages[rows[t]]          =  [rms_norm(c, kv_norm), rotate(r)]
    key.pages[key.rows[t]]  =  [rotate(the first P of n), the rest of n]   with n = layer_norm(k, key.norm, key.bias)

    rotate(x)  =  x * cos[t] + [x2, x1] * signed_sin[t]     with x1, x2 the halves of x or, if pairs are interleaved,
                                                            its even and its odd elements

Shapes: x [T, Q + R + P (+ Di)], contiguous; q_norm [Q]; kv_norm [R]; cos = [c, c] and signed_sin = [-s, s], both
[T, P]; pages [pages, page_size, R + P] and key.pages [pages, page_size, Di], rows contiguous, otherwise any strides;
rows, key.rows [T] int32: page * page_size + slot, or -1 for a row that is not written, such as the padding of a CUDA
graph's batch. No two tokens share a row. Pairs of r are interleaved; those of k if `key.interleaved`. Norms and
products are rounded before they are used, as in transformers. Pages of uint8 hold packed rows (packed_rows.py). With
`key.scales`, keys are stored in fp8 (fp8_rows.py).

Lower bound: 2 * T * (Q + R + P + Di) elements moved; at decode sizes one launch latency.
"""

import torch
from torch.nn.functional import layer_norm

from ..attention.rope_kv_write import rotate_reference
from ..backends.dispatch import Impl, use_triton
from ..linear.rms_norm import rms_norm_reference
from .fp8_rows import FP8, quantize_rows_reference
from .key_write import KeyWrite
from .packed_rows import pack_rows_reference, packed_bytes


def rotate_pairs_reference(
    x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Rotate x [T, heads, P]. `interleaved` pairs adjacent elements, and puts the first elements of all pairs into the
    first half: the order changes, in the same way for queries and keys.
    """
    if interleaved:
        x = x.view(*x.shape[:-1], x.shape[-1] // 2, 2).transpose(-1, -2).flatten(-2)
    return rotate_reference(x, cos, signed_sin)


def write_rows_reference(pages: torch.Tensor, rows: torch.Tensor, content: torch.Tensor) -> None:
    """pages[rows[t]] = content[t] where rows[t] >= 0."""
    real = rows >= 0
    chosen, page_size = rows[real].long(), pages.shape[1]
    pages[chosen // page_size, chosen % page_size] = content[real]


def latent_rows_reference(
    x: torch.Tensor, kv_norm: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """Cache rows [T, R + P] from x [T, R + P]."""
    latent, turning = torch.split_with_sizes(x, (len(kv_norm), cos.shape[1]), dim=-1)
    rotated = rotate_pairs_reference(turning.unsqueeze(1), cos, signed_sin, interleaved=True).squeeze(1)
    return torch.cat((rms_norm_reference(latent, kv_norm, eps), rotated), dim=-1)


def index_keys_reference(
    x: torch.Tensor, key: KeyWrite, cos: torch.Tensor, signed_sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """Index keys [T, Di] from x [T, Di]."""
    normed = layer_norm(x, key.norm.shape, key.norm, key.bias, eps)
    turning, plain = normed[:, : cos.shape[1]], normed[:, cos.shape[1] :]
    rotated = rotate_pairs_reference(turning.unsqueeze(1), cos, signed_sin, interleaved=key.interleaved)
    return torch.cat((rotated.squeeze(1), plain), dim=-1)


def latent_write_reference(
    x: torch.Tensor,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    pages: torch.Tensor,
    rows: torch.Tensor,
    *,
    eps: float,
    key: KeyWrite | None,
) -> torch.Tensor:
    latent_end = len(q_norm) + len(kv_norm) + cos.shape[1]
    latent = latent_rows_reference(x[:, len(q_norm) : latent_end], kv_norm, cos, signed_sin, eps)
    if pages.dtype == torch.uint8:
        latent = pack_rows_reference(latent, len(kv_norm))
    write_rows_reference(pages, rows, latent)
    if key is not None:
        keys = index_keys_reference(x[:, latent_end:], key, cos, signed_sin, eps)
        if key.scales is not None:
            keys, scales = quantize_rows_reference(keys)
            write_rows_reference(key.scales, key.rows, scales)
        write_rows_reference(key.pages, key.rows, keys)
    return rms_norm_reference(x[:, : len(q_norm)], q_norm, eps)


def latent_write(
    x: torch.Tensor,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    pages: torch.Tensor,
    rows: torch.Tensor,
    *,
    eps: float,
    key: KeyWrite | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Returns the compressed queries [T, Q] and writes rows and keys in place; see the module docstring."""
    tokens, rope_dim = cos.shape
    width = len(q_norm) + len(kv_norm) + rope_dim + (0 if key is None else len(key.norm))
    if x.shape != (tokens, width) or signed_sin.shape != cos.shape or not x.is_contiguous():
        raise ValueError(
            f"x {list(x.shape)}, cos {list(cos.shape)} and signed_sin {list(signed_sin.shape)} do not fit: x has rows "
            f"of {width}, contiguous"
        )
    if pages.dtype == torch.uint8:
        _check_rows("pages", pages, rows, tokens, packed_bytes(len(kv_norm), rope_dim), torch.uint8)
    else:
        _check_rows("pages", pages, rows, tokens, len(kv_norm) + rope_dim, x.dtype)
    if key is not None:
        _check_rows("key pages", key.pages, key.rows, tokens, len(key.norm), x.dtype if key.scales is None else FP8)
        if key.scales is not None and (key.scales.shape != key.pages.shape[:2] or key.scales.dtype != torch.float32):
            raise ValueError(
                f"key scales {key.scales.dtype} {list(key.scales.shape)} are not one float32 for each key of pages "
                f"{list(key.pages.shape)}"
            )
        if key.bias.shape != key.norm.shape or len(key.norm) < rope_dim:
            raise ValueError(f"key norm {list(key.norm.shape)} and bias {list(key.bias.shape)} differ or are too short")
    if not use_triton(impl, x.device):
        return latent_write_reference(x, q_norm, kv_norm, cos, signed_sin, pages, rows, eps=eps, key=key)
    if cos.stride() != signed_sin.stride() or cos.stride(1) != 1:
        raise ValueError(f"cos has strides {cos.stride()}, signed_sin {signed_sin.stride()}: rows must be contiguous")
    from .latent_write_triton import launch_latent_write

    compressed = x.new_empty(tokens, len(q_norm))
    launch_latent_write(x, q_norm, kv_norm, cos, signed_sin, pages, rows, eps, key, compressed)
    return compressed


def _check_rows(
    name: str, pages: torch.Tensor, rows: torch.Tensor, tokens: int, row_size: int, dtype: torch.dtype
) -> None:
    if pages.ndim != 3 or pages.shape[2] != row_size or pages.dtype != dtype or pages.stride(2) != 1:
        raise ValueError(
            f"{name} {pages.dtype} {list(pages.shape)} do not hold contiguous {dtype} rows of {row_size} elements"
        )
    if rows.shape != (tokens,) or rows.dtype != torch.int32:
        raise ValueError(
            f"rows {rows.dtype} {list(rows.shape)} of {name} are not one int32 for each of {tokens} tokens"
        )
