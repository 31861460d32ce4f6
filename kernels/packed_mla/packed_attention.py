"""Sparse attention over packed rows (mla/packed_rows.py).

    sparse_mla_packed(query, pages, rows)  =  sparse_mla(query, *unpack_rows(pages, rows))

Shapes as there and in mla/sparse_mla.py; value_dim is R. Attention of few heads reads packed rows directly. That of
more heads takes as long to multiply as to read: it unpacks the rows into a workspace first, some tokens at a time.

Lower bound: T * K packed rows read; with a workspace, T * K rows written and read again.
"""

import torch

from ..backends.dispatch import Impl, use_triton
from ..mla.packed_rows import checked_rope_dim, unpack_rows
from ..mla.sparse_mla import sparse_mla

_WORKSPACE_BYTES = 256 << 20
"""Of rows that are unpacked at a time."""
FUSED_HEADS = 16
"""Attention of up to this many heads reads packed rows directly."""


def sparse_mla_packed(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: torch.Tensor,
    *,
    scale: float,
    value_dim: int,
    impl: Impl = "auto",
    fused: bool | None = None,
) -> torch.Tensor:
    """Attend to the selected packed rows; see the module docstring. `fused` reads them directly: None for few heads."""
    tokens, heads, dim = query.shape
    rope_dim = checked_rope_dim(pages, rows, value_dim)
    if dim != value_dim + rope_dim or len(rows) != tokens:
        raise ValueError(
            f"query {list(query.shape)} does not match rows {list(rows.shape)} of {value_dim} + {rope_dim} elements"
        )
    if use_triton(impl, query.device) and (heads <= FUSED_HEADS if fused is None else fused):
        if query.stride(2) != 1 or pages.stride(2) != 1 or rows.stride(1) != 1:
            raise ValueError(
                f"query has strides {query.stride()}, pages {pages.stride()}, rows {rows.stride()}: "
                "heads and rows must be contiguous"
            )
        from .packed_attention_triton import launch_sparse_mla_packed

        out = torch.empty(tokens, heads, value_dim, dtype=query.dtype, device=query.device)
        launch_sparse_mla_packed(query, pages, rows, out, scale=scale)
        return out
    at_once = max(_WORKSPACE_BYTES // (max(rows.shape[1], 1) * dim * query.dtype.itemsize), 1)
    parts = []
    for first in range(0, tokens, at_once):
        part = slice(first, first + at_once)
        unpacked = unpack_rows(pages, rows[part], kv_rank=value_dim, dtype=query.dtype, impl=impl)
        parts.append(sparse_mla(query[part], *unpacked, scale=scale, value_dim=value_dim, impl=impl))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
