"""Attention over selected rows of a latent cache: every head of a token reads the same rows (absorbed MLA).

    row[t, j]        =  pages[rows[t, j] // S, rows[t, j] % S]           for the j with rows[t, j] >= 0
    weight[t, h, j]  =  softmax_j(scale * query[t, h] . row[t, j])       over the same j
    out[t, h]        =  sum_j weight[t, h, j] * row[t, j, :value_dim]

Shapes: query [T, H, D]; pages [P, S, D], any strides with contiguous rows (a layer of a page-major pool); rows [T, K]
int32, -1 for none, at any position; out [T, H, value_dim] in query's dtype. A token without rows gets zeros. Scores,
softmax and sums are float32; the fast kernels round weights to query's dtype before they multiply them with values.

On a GPU there are two kernels. The CUDA kernel supports the geometry of DeepSeek-V3.2 on Hopper (sparse_mla_cuda.py);
`auto` uses it, if possible, from 256 heads of all tokens together on. Otherwise it uses the Triton kernel.

Lower bound: T * K * D elements read once, or 2 * T * K * H * (D + value_dim) operations, whichever takes longer: at
H = 128 the two are about equal on an H200.
"""

from typing import Literal

import torch

from ..backends.dispatch import Impl, use_triton
from .sparse_mla_cuda import launch_sparse_mla_cuda, unsuitable

SparseMlaImpl = Impl | Literal["cuda"]

_REFERENCE_ELEMENTS = 2**24
"""Elements of gathered rows that the reference processes at a time."""
_CUDA_HEADS = 256
"""From this many heads of all tokens on, the CUDA kernel is faster than Triton's."""


def sparse_mla_reference(
    query: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, *, scale: float, value_dim: int
) -> torch.Tensor:
    page_size, dim = pages.shape[1:]
    out = torch.empty(*query.shape[:2], value_dim, dtype=query.dtype, device=query.device)
    at_once = max(_REFERENCE_ELEMENTS // max(rows.shape[1] * dim, 1), 1)
    for start in range(0, len(query), at_once):
        part = slice(start, start + at_once)
        chosen = rows[part].long()
        row = pages[chosen.clamp(min=0) // page_size, chosen.clamp(min=0) % page_size].float()  # [n, K, D]
        # row 0 is read where none is selected: it may hold NaN, and 0 * NaN is NaN
        row = row.masked_fill((chosen < 0).unsqueeze(-1), 0.0)
        score = (query[part].float() @ row.transpose(1, 2) * scale).masked_fill((chosen < 0).unsqueeze(1), -torch.inf)
        weight = score.softmax(dim=-1).nan_to_num(0.0)  # nan: a token without rows
        out[part] = (weight @ row[..., :value_dim]).to(out.dtype)
    return out


def sparse_mla(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: torch.Tensor,
    *,
    scale: float,
    value_dim: int,
    impl: SparseMlaImpl = "auto",
) -> torch.Tensor:
    """Attend to the selected rows; see the module docstring."""
    tokens, heads, dim = query.shape
    if pages.ndim != 3 or pages.shape[2] != dim or pages.dtype != query.dtype:
        raise ValueError(
            f"{pages.dtype} pages {list(pages.shape)} do not hold rows for {query.dtype} query {list(query.shape)}"
        )
    check_rows(query, rows)
    if not 1 <= value_dim <= dim:
        raise ValueError(f"value_dim must be between 1 and the row's {dim}, got {value_dim}")
    if impl != "cuda" and not use_triton(impl, query.device):
        return sparse_mla_reference(query, pages, rows, scale=scale, value_dim=value_dim)
    check_strides(query, pages, rows)
    reason = unsuitable(query, pages, scale=scale, value_dim=value_dim)
    if impl == "cuda" and reason is not None:
        raise ValueError(f"the CUDA kernel of sparse_mla does not support this: {reason}")
    out = torch.empty(tokens, heads, value_dim, dtype=query.dtype, device=query.device)
    if impl == "cuda" or (impl == "auto" and reason is None and tokens * heads >= _CUDA_HEADS):
        launch_sparse_mla_cuda(query, pages, rows, out, scale=scale)
    else:
        from .sparse_mla_triton import launch_sparse_mla

        launch_sparse_mla(query, pages, rows, out, scale=scale)
    return out


def check_rows(query: torch.Tensor, rows: torch.Tensor) -> None:
    """Raise ValueError unless `rows` are those of the query's tokens."""
    if rows.ndim != 2 or len(rows) != len(query) or rows.dtype != torch.int32:
        raise ValueError(f"{rows.dtype} rows {list(rows.shape)} are not the int32 rows of {len(query)} tokens")


def check_strides(query: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor) -> None:
    """Raise ValueError unless kernels can read these tensors."""
    if query.stride(2) != 1 or pages.stride(2) != 1 or rows.stride(1) != 1:
        raise ValueError(
            f"query has strides {query.stride()}, pages {pages.stride()}, rows {rows.stride()}: "
            "heads and rows must be contiguous"
        )
