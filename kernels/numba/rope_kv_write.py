"""Numba kernel of ../attention/rope_kv_write.py: a thread processes some of the tokens."""
# mypy: allow-untyped-defs, allow-untyped-decorators

import torch

from .openmp import fields, floats, kernel, kernel_function, longs, share, threads_for
from .rms_norm import norm_row


@kernel_function
def _rotate(head, cos, signed_sin, out, dim):
    """`out` may be `head` itself."""
    half = dim // 2
    for i in range(half):
        one, two = head[i], head[half + i]
        out[i] = one * cos[i] + two * signed_sin[i]
        out[half + i] = two * cos[half + i] + one * signed_sin[half + i]


@kernel_function
def rope_and_write(a, token, q_norm, k_norm, keys, values):
    """In a kernel: rotate the queries and the keys of a token, and write its keys and values into the pages at these
    addresses. `a` has the other fields of the kernel below.
    """
    heads, kv_heads, dim = a.heads, a.kv_heads, a.head_dim
    row_bytes, head_bytes = 4 * (heads + 2 * kv_heads) * dim, 4 * dim
    cos, signed_sin = floats(a.cos + token * head_bytes, dim), floats(a.signed_sin + token * head_bytes, dim)
    slot = longs(a.page_ids, a.tokens)[token] * a.page_stride + longs(a.offsets, a.tokens)[token] * a.token_stride
    for index in range(heads + kv_heads):
        head = floats(a.qkv + token * row_bytes + index * head_bytes, dim)
        if index < heads:
            out, norm = floats(a.query + (token * heads + index) * head_bytes, dim), q_norm
        else:
            out, norm = floats(keys + 4 * (slot + (index - heads) * a.head_stride), dim), k_norm
        if norm:
            norm_row(head, floats(norm, dim), a.eps, out, dim)
            head = out
        _rotate(head, cos, signed_sin, out, dim)
    for index in range(kv_heads):
        head = floats(a.qkv + token * row_bytes + (heads + kv_heads + index) * head_bytes, dim)
        value = floats(values + 4 * (slot + index * a.head_stride), dim)
        for i in range(dim):
            value[i] = head[i]


@kernel(
    "qkv cos signed_sin q_norm k_norm keys values query page_ids offsets "
    "tokens heads kv_heads head_dim page_stride head_stride token_stride",
    "eps",
)
def _rope_kv_write(arguments):
    a = fields(arguments)
    first, last = share(a.tokens)
    for token in range(first, last):
        rope_and_write(a, token, a.q_norm, a.k_norm, a.keys, a.values)


def launch_rope_kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_ids: torch.Tensor,
    offsets: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    live_rows: torch.Tensor | None,
    query: torch.Tensor,
) -> None:
    rows, heads, head_dim = query.shape
    tokens = rows if live_rows is None else int(live_rows)
    page_ids, offsets = page_ids.long().contiguous(), offsets.long().contiguous()
    page_stride, head_stride, token_stride, _ = key_pages.stride()
    _rope_kv_write(
        qkv.data_ptr(),
        cos.data_ptr(),
        signed_sin.data_ptr(),
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        key_pages.data_ptr(),
        value_pages.data_ptr(),
        query.data_ptr(),
        page_ids.data_ptr(),
        offsets.data_ptr(),
        tokens,
        heads,
        key_pages.shape[1],
        head_dim,
        page_stride,
        head_stride,
        token_stride,
        eps,
        threads=threads_for(qkv.numel()),
    )
