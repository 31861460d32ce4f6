"""Rotates a latent-attention layer's queries: those of its heads and those of its indexer, in one pass.

    x[t]                  =  H heads [nope, r] with r the last P elements, then Hi indexer heads of Di
    query[t, h, -P:]      =  rotate(r)                                        pairs interleaved
    index_query[t, h]     =  [rotate(its first P elements), the rest]         pairs interleaved if `interleaved`

`rotate` is that of latent_write.py. Shapes: x [T, H * head_dim + Hi * Di], contiguous; cos, signed_sin [T, P]; query
[T, H, D], contiguous heads, of which only the last P elements are written; index_query [T, Hi, Di], new, None where
Hi = 0; with `fp8` in fp8 with scales [T, Hi] (fp8_rows.py). Lower bound: one launch latency at decode sizes.
"""

from typing import NamedTuple

import torch

from ..backends.dispatch import Impl, use_triton
from .fp8_rows import FP8, quantize_rows_reference
from .latent_write import rotate_pairs_reference


class IndexQueries(NamedTuple):
    """The queries of an indexer [T, Hi, Di], and their scales [T, Hi] float32 if they are fp8."""

    values: torch.Tensor
    scales: torch.Tensor | None


def rotate_queries_reference(
    x: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    query: torch.Tensor,
    *,
    head_dim: int,
    index_dim: int,
    interleaved: bool,
    fp8: bool,
) -> IndexQueries | None:
    tokens, heads, _ = query.shape
    rope_dim, own = cos.shape[1], heads * head_dim
    turning = x[:, :own].view(tokens, heads, head_dim)[:, :, -rope_dim:]
    query[:, :, -rope_dim:] = rotate_pairs_reference(turning, cos, signed_sin, interleaved=True)
    if x.shape[1] == own:
        return None
    index_heads = x[:, own:].view(tokens, -1, index_dim)
    rotated = rotate_pairs_reference(index_heads[:, :, :rope_dim], cos, signed_sin, interleaved=interleaved)
    values = torch.cat((rotated, index_heads[:, :, rope_dim:]), dim=-1)
    return IndexQueries(*quantize_rows_reference(values)) if fp8 else IndexQueries(values, None)


def rotate_queries(
    x: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    query: torch.Tensor,
    *,
    head_dim: int,
    index_dim: int,
    interleaved: bool,
    fp8: bool = False,
    impl: Impl = "auto",
) -> IndexQueries | None:
    """Fill the end of `query` and return the indexer's queries, if x has any; see the module docstring."""
    tokens, heads, dim = query.shape
    index_heads, rest = divmod(x.shape[1] - heads * head_dim, index_dim)
    if len(x) != tokens or index_heads < 0 or rest or not x.is_contiguous():
        raise ValueError(
            f"x {list(x.shape)} is not {tokens} contiguous rows of {heads} heads of {head_dim} and some of {index_dim}"
        )
    rope_dim = cos.shape[1]
    if not cos.shape == signed_sin.shape == (tokens, rope_dim) or rope_dim > min(head_dim, index_dim, dim):
        raise ValueError(
            f"cos {list(cos.shape)} and signed_sin {list(signed_sin.shape)} do not fit {tokens} tokens of heads of "
            f"{head_dim}, {index_dim} and {dim}"
        )
    if not x.dtype == cos.dtype == signed_sin.dtype == query.dtype:
        raise ValueError(f"x is {x.dtype}, cos {cos.dtype}, signed_sin {signed_sin.dtype}, query {query.dtype}")
    if not use_triton(impl, x.device):
        return rotate_queries_reference(
            x, cos, signed_sin, query, head_dim=head_dim, index_dim=index_dim, interleaved=interleaved, fp8=fp8
        )
    if cos.stride() != signed_sin.stride() or cos.stride(1) != 1 or query.stride(2) != 1:
        raise ValueError(
            f"cos has strides {cos.stride()}, signed_sin {signed_sin.stride()}, query {query.stride()}: "
            "rows must be contiguous"
        )
    from .rotate_queries_triton import launch_rotate_queries

    values = torch.empty(tokens, index_heads, index_dim, dtype=FP8 if fp8 else x.dtype, device=x.device)
    scales = torch.empty(tokens, index_heads, dtype=torch.float32, device=x.device) if fp8 else None
    launch_rotate_queries(x, cos, signed_sin, query, values, scales, head_dim=head_dim, interleaved=interleaved)
    return IndexQueries(values, scales) if index_heads else None
