"""The lightning indexer of sparse attention: selects the k tokens that a query attends to, among those that it sees.

    score(t, s)  =  sum_h weights[t, h] * relu(query[t, h] . key[s])        over the visible tokens s of t's sequence
    out[t]       =  the positions of the k best scores, in ascending order, then -1

Shapes: query [T, Hi, Di]; weights [T, Hi] float32, every scale folded in, of either sign; key_pages [pages, 1,
page_size, Di], any strides with contiguous rows (a layer of a page-major pool), keys in query's dtype; out [T, k]
int32. Positions count from 0 within t's sequence. Products are summed in float32. Of equal scores (0 and -0 are equal)
the lower position wins, so the result depends only on the scores. A token that sees n <= k tokens gets 0 .. n - 1, and
a token that sees none (a padded row) only -1.

If queries and keys are fp8 (fp8_rows.py), `scales` has those of both, which are positive:

    score(t, s)  =  key_scale[s] * sum_h weights[t, h] * query_scale[t, h] * relu(query[t, h] . key[s])

With `rows_of`, the result has flat rows of a pool instead of positions: those of its page table.

`IndexPlan` holds what each token sees. Only its tensors change from step to step: a captured CUDA graph computes what
they hold when it is replayed.

Lower bound: every visible key read once, sum(visible) * Di elements if each sequence has one query; 132 bytes each in
fp8 if Di = 128.
"""

from collections.abc import Callable

import torch

from ...common.arithmetic import ceil_div
from ..backends.dispatch import Impl, use_triton
from .fp8_rows import FP8
from .index_plan import IndexPlan, IndexScales, select_top_reference

_REFERENCE_PRODUCTS = 2**24
"""Products query[t, h] . key[s] that the reference computes at a time."""


def index_scores_reference(
    query: torch.Tensor,
    weights: torch.Tensor,
    key_pages: torch.Tensor,
    plan: IndexPlan,
    scales: IndexScales | None = None,
) -> torch.Tensor:
    """[T, max_visible] float32 scores, -inf for tokens that are not visible."""
    if scales is not None:
        weights = weights * scales.query
    scores = torch.full((plan.tokens, plan.max_visible), -torch.inf, device=query.device)
    for sequence in set(plan.sequence.tolist()):
        tokens = (plan.sequence == sequence).nonzero().flatten()
        seen = int(plan.visible[tokens].max())
        if seen == 0:
            continue
        pages = plan.page_table[sequence, : ceil_div(seen, plan.page_size)]
        keys = key_pages[pages.long(), 0].flatten(0, 1)[:seen].float()
        at_once = max(_REFERENCE_PRODUCTS // (query.shape[1] * seen), 1)
        for start in range(0, len(tokens), at_once):
            some = tokens[start : start + at_once]
            products = torch.relu(query[some].float() @ keys.T)  # [n, Hi, seen]
            scores[some, :seen] = (weights[some].unsqueeze(1) @ products).squeeze(1)
        if scales is not None:
            scores[tokens, :seen] *= scales.keys[pages.long(), 0].flatten()[:seen]
    positions = torch.arange(plan.max_visible, device=query.device)
    return scores.masked_fill_(positions >= plan.visible.unsqueeze(1), -torch.inf)


def index_topk_reference(
    query: torch.Tensor,
    weights: torch.Tensor,
    key_pages: torch.Tensor,
    plan: IndexPlan,
    k: int,
    scales: IndexScales | None = None,
) -> torch.Tensor:
    return select_top_reference(index_scores_reference(query, weights, key_pages, plan, scales), plan.visible, k)


def index_topk(
    query: torch.Tensor,
    weights: torch.Tensor,
    key_pages: torch.Tensor,
    plan: IndexPlan,
    k: int,
    *,
    scales: IndexScales | None = None,
    rows_of: IndexPlan | None = None,
    meanwhile: Callable[[], None] | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Select k positions for every token; see the module docstring. `meanwhile` is called when all scores are enqueued.
    What it enqueues on another stream can run concurrently with the selection, which leaves most of the GPU idle.
    """
    tokens, heads, dim = query.shape
    if tokens != plan.tokens or weights.shape != (tokens, heads) or weights.dtype != torch.float32:
        raise ValueError(
            f"query {list(query.shape)} and {weights.dtype} weights {list(weights.shape)} do not fit a plan of "
            f"{plan.tokens} tokens: weights are one float32 per token and head"
        )
    if key_pages.ndim != 4 or key_pages.shape[1:] != (1, plan.page_size, dim) or key_pages.dtype != query.dtype:
        raise ValueError(
            f"{key_pages.dtype} key pages {list(key_pages.shape)} do not hold one {query.dtype} key of {dim} per token "
            f"in pages of {plan.page_size}"
        )
    if (query.dtype == FP8) != (scales is not None):
        given = "without" if scales is None else "with"
        raise ValueError(f"queries and keys in {FP8} have scales, others have none; got {query.dtype} {given} scales")
    if scales is not None and (scales.query.shape, scales.keys.shape) != (weights.shape, (*key_pages.shape[:3], 1)):
        raise ValueError(
            f"scales {list(scales.query.shape)} and {list(scales.keys.shape)} are not one per query "
            f"{list(weights.shape)} and one per key {list(key_pages.shape)}"
        )
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if rows_of is not None and rows_of.tokens != tokens:
        raise ValueError(f"rows of a plan of {rows_of.tokens} tokens do not fit {tokens}")
    if not use_triton(impl, query.device):
        positions = index_topk_reference(query, weights, key_pages, plan, k, scales)
        if meanwhile is not None:
            meanwhile()
        return positions if rows_of is None else rows_of.flat_rows(positions)
    if query.stride()[1:] != (dim, 1) or key_pages.stride(-1) != 1 or weights.stride(1) != 1:
        raise ValueError(
            f"query has strides {query.stride()}, weights {weights.stride()}, key pages {key_pages.stride()}: "
            "heads and keys must be contiguous"
        )
    if scales is not None and not scales.query.is_contiguous():
        raise ValueError(f"scales of queries have strides {scales.query.stride()}: they must be contiguous")
    from .index_topk_triton import launch_index_topk

    out = torch.empty(tokens, k, dtype=torch.int32, device=query.device)
    launch_index_topk(query, weights, key_pages, plan, scales, rows_of, out, meanwhile)
    return out
