"""Causal attention over all rows of a latent cache: every head of a token reads the same rows (absorbed MLA).

    row[i, j]          =  the latent row of token j of sequence i, in its page j // S at slot j % S
    weight[i, r, h, j] =  softmax_j(scale * query[i, r, h] . row[i, j])            over the j that query r sees
    out[i, r, h]       =  sum_j weight[i, r, h, j] * row[i, j, :value_dim]

Query r of sequence i sees the tokens up to itself. Shapes: query [T, H, D], contiguous, the queries of all sequences
one after another; pages [P, S, D], any strides with contiguous rows (a layer of a page-major pool); out [T, H,
value_dim] in query's dtype. The plan (tile_plan.py) says which queries, pages and keys there are. Scores, softmax and
sums are float32; the fast kernels round weights to query's dtype before they multiply them with values.

On a GPU there are two kernels. The CUDA kernel supports rows of 512 + 64 elements in 16 bits on Hopper
(dense_mla_cuda.py), and takes half the time of the Triton kernel, which supports every geometry. `auto` uses the CUDA
kernel if it supports the tensors.

Lower bound: every row read once, or 2 * H * (D + value_dim) operations for each query and key, whichever takes longer:
in a decode step with H = 128 the two are about equal on an H200.
"""

from typing import Literal

import torch

from ..backends.dispatch import Impl, use_triton
from ..dsa.sparse_mla_cuda import unsuitable_latents
from .dense_mla_cuda import launch_dense_mla_cuda
from .tile_plan import TilePlan

DenseMlaImpl = Impl | Literal["cuda"]


def dense_mla_reference(
    query: torch.Tensor, pages: torch.Tensor, plan: TilePlan, *, scale: float, value_dim: int
) -> torch.Tensor:
    """Tile by tile. Reads the plan on the host."""
    page_size = pages.shape[1]
    out = torch.empty(*query.shape[:2], value_dim, dtype=query.dtype, device=query.device)
    partials: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * plan.num_partials
    for first_page, row, count, visible, start, end, partial in plan.pieces.t().tolist():
        part = slice(row, row + count)
        if start == end:
            out[part] = 0
            continue
        key = torch.arange(start, end, device=query.device)
        page = plan.pages[first_page + key // page_size].long()
        latent = pages[page, key % page_size].float()  # [K, D]
        score = query[part].float() @ latent.t() * scale  # [n, H, K]
        sees = key < visible + torch.arange(count, device=query.device).unsqueeze(1)
        score.masked_fill_(~sees.unsqueeze(1), -torch.inf)
        log_sum = score.logsumexp(-1, keepdim=True)
        # clamped: the log-sum of a query that sees no key of the piece is -inf
        attended = (score - log_sum.clamp(min=-1e30)).exp() @ latent[:, :value_dim]
        if partial < 0:
            out[part] = attended.to(out.dtype)
        else:
            partials[partial] = attended, log_sum
    for row, count, first, last in plan.splits.t().tolist():
        found = [each for each in partials[first:last] if each is not None]
        if found:
            weight = torch.stack([log_sum for _, log_sum in found]).softmax(0)
            out[row : row + count] = (weight * torch.stack([each for each, _ in found])).sum(0).to(out.dtype)
    return out


def dense_mla(
    query: torch.Tensor,
    pages: torch.Tensor,
    plan: TilePlan,
    *,
    scale: float,
    value_dim: int,
    impl: DenseMlaImpl = "auto",
) -> torch.Tensor:
    """Attend to all visible rows; see the module docstring."""
    tokens, heads, dim = query.shape
    if pages.ndim != 3 or pages.shape[1:] != (plan.page_size, dim) or pages.dtype != query.dtype:
        raise ValueError(
            f"{pages.dtype} pages {list(pages.shape)} are not pages of {plan.page_size} rows for {query.dtype} query "
            f"{list(query.shape)}"
        )
    if tokens != plan.tokens:
        raise ValueError(f"query has {tokens} tokens, the plan {plan.tokens}")
    if not 1 <= value_dim <= dim:
        raise ValueError(f"value_dim must be between 1 and the row's {dim}, got {value_dim}")
    if impl != "cuda" and not use_triton(impl, query.device):
        return dense_mla_reference(query, pages, plan, scale=scale, value_dim=value_dim)
    if not query.is_contiguous() or pages.stride(2) != 1:
        raise ValueError(
            f"query has strides {query.stride()}, pages {pages.stride()}: queries and rows must be contiguous"
        )
    reason: str | None = "impl is triton"
    if impl != "triton":
        reason = unsuitable_latents(query, pages, scale=scale, value_dim=value_dim)
    if impl == "cuda" and reason is not None:
        raise ValueError(f"the CUDA kernel of dense_mla does not support this: {reason}")
    from .dense_mla_triton import launch_combine, launch_dense_mla

    tile_rows = plan.tile_tokens * heads
    out = torch.empty(tokens, heads, value_dim, dtype=query.dtype, device=query.device)
    partial = torch.empty(plan.num_partials, tile_rows, value_dim, dtype=torch.float32, device=query.device)
    log_sum = torch.empty(plan.num_partials, tile_rows, dtype=torch.float32, device=query.device)
    if reason is None:
        launch_dense_mla_cuda(query, pages, plan, out, partial, log_sum, scale=scale)
    else:
        launch_dense_mla(query, pages, plan, out, partial, log_sum, scale=scale)
    if plan.splits.shape[1]:
        launch_combine(plan, out, partial, log_sum)
    return out
