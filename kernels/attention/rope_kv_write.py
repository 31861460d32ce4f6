"""Converts the fused projection to attention inputs: normalises and rotates q and k, writes k and v into pages.

    q, k, v    =  the Hq, Hkv and Hkv heads of qkv[t]
    q, k       =  rms_norm(q, q_norm), rms_norm(k, k_norm)     where the model has these norms
    rotate(x)  =  x * cos[t] + [x2, x1] * signed_sin[t]        with x1, x2 the halves of a head
    query[t]   =  rotate(q)
    key_pages[page_ids[t], :, offsets[t]]    =  rotate(k)
    value_pages[page_ids[t], :, offsets[t]]  =  v

Shapes: qkv [tokens, (Hq + 2 Hkv) * D], contiguous; cos = [c, c] and signed_sin = [-s, s], both [tokens, D]; key_pages,
value_pages [pages, Hkv, page_size, D], the last dimension contiguous, otherwise any strides; page_ids, offsets
[tokens]; query [tokens, Hq, D]. Two tokens never share a slot. Products are rounded before they are added, as in
transformers. Pages have the dtype of qkv or float8_e4m3fn, as in kv_write.py.

`live_rows`, a device tensor of one integer, is the number of valid rows; nothing is written for the others. It lets a
CUDA graph run a padded batch. Lower bound: 2 * tokens * (Hq + 2 Hkv) * D elements moved.
"""

import torch

from ..backends.dispatch import Impl, launcher, use_numba, use_triton
from ..linear.rms_norm import rms_norm_reference
from .kv_write import can_store, kv_write_reference


def rotate_reference(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [tokens, heads, D]: the two halves of a head are the two coordinates (not interleaved)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((second, first), dim=-1) * signed_sin.unsqueeze(1)


def rope_kv_write_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_ids: torch.Tensor,
    offsets: torch.Tensor,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    _, kv_heads, _, head_dim = key_pages.shape
    heads = qkv.view(len(qkv), -1, head_dim)
    q_heads = heads.shape[1] - 2 * kv_heads
    query_key, value = heads[:, : q_heads + kv_heads], heads[:, q_heads + kv_heads :]
    if q_norm is not None and k_norm is not None:
        query = rms_norm_reference(heads[:, :q_heads], q_norm, eps)
        key = rms_norm_reference(query_key[:, q_heads:], k_norm, eps)
        query_key = torch.cat((query, key), dim=1)
    rotated = rotate_reference(query_key, cos, signed_sin)
    query, key = rotated[:, :q_heads], rotated[:, q_heads:]
    kv_write_reference(key_pages, value_pages, key, value, page_ids, offsets)
    return query


def rope_kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_ids: torch.Tensor,
    offsets: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    live_rows: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Returns the rotated queries and writes keys and values in place; see the module docstring."""
    tokens, q_heads = check_rope(qkv, cos, signed_sin, key_pages, value_pages, page_ids, offsets, q_norm, k_norm)
    norms = () if q_norm is None or k_norm is None else (q_norm, k_norm)
    if use_numba(impl, qkv, cos, signed_sin, *norms, pages=(key_pages, value_pages)):
        launch = launcher("numba.rope_kv_write", "launch_rope_kv_write")
    elif use_triton(impl, qkv.device):
        launch = launcher("attention.rope_kv_write_triton", "launch_rope_kv_write")
    else:
        if live_rows is not None:
            raise ValueError("live_rows is for padded batches in CUDA graphs")
        return rope_kv_write_reference(
            qkv, cos, signed_sin, key_pages, value_pages, page_ids, offsets, q_norm=q_norm, k_norm=k_norm, eps=eps
        )
    check_strides(cos, signed_sin, key_pages, value_pages)
    query = qkv.new_empty(tokens, q_heads, key_pages.shape[3])
    launch(qkv, cos, signed_sin, key_pages, value_pages, page_ids, offsets, q_norm, k_norm, eps, live_rows, query)
    return query


def check_rope(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_ids: torch.Tensor,
    offsets: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
) -> tuple[int, int]:
    """The numbers of tokens and of query heads; raises ValueError if the arguments do not fit each other."""
    tokens, (_, kv_heads, _, head_dim) = qkv.shape[0], key_pages.shape
    q_heads = qkv.shape[-1] // head_dim - 2 * kv_heads
    if qkv.shape != (tokens, (q_heads + 2 * kv_heads) * head_dim) or q_heads < 1 or not qkv.is_contiguous():
        raise ValueError(f"qkv {list(qkv.shape)} does not hold the heads of pages {list(key_pages.shape)}, contiguous")
    if not cos.shape == signed_sin.shape == (tokens, head_dim) or not page_ids.shape == offsets.shape == (tokens,):
        raise ValueError(
            f"cos {list(cos.shape)}, signed_sin {list(signed_sin.shape)}, page_ids {list(page_ids.shape)} and offsets "
            f"{list(offsets.shape)} do not fit {tokens} tokens of head size {head_dim}"
        )
    pages_fit = can_store(key_pages.dtype, qkv.dtype) and key_pages.dtype == value_pages.dtype
    if not qkv.dtype == cos.dtype == signed_sin.dtype or not pages_fit:
        raise ValueError(
            f"qkv is {qkv.dtype}, cos {cos.dtype}, signed_sin {signed_sin.dtype}, the pages are {key_pages.dtype} and "
            f"{value_pages.dtype}"
        )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must be given together")
    if q_norm is not None and k_norm is not None and q_norm.dtype != k_norm.dtype:
        raise ValueError(f"q_norm is {q_norm.dtype}, k_norm {k_norm.dtype}: both must have one dtype")
    return tokens, q_heads


def check_strides(
    cos: torch.Tensor, signed_sin: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor
) -> None:
    """Raise ValueError if kernels cannot address these tensors."""
    if cos.stride() != signed_sin.stride() or cos.stride(1) != 1:
        raise ValueError(f"cos has strides {cos.stride()}, signed_sin {signed_sin.stride()}: rows must be contiguous")
    if key_pages.stride() != value_pages.stride() or key_pages.stride(-1) != 1:
        raise ValueError(f"key pages have strides {key_pages.stride()}, value pages {value_pages.stride()}")
