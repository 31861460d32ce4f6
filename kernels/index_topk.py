"""The lightning indexer of sparse attention: which k of the tokens that a query sees it will attend to.

    score(t, s)  =  sum_h weights[t, h] * relu(query[t, h] . key[s])        over the visible tokens s of t's sequence
    out[t]       =  the positions of the k best scores, in ascending order, then -1

Shapes: query [T, Hi, Di]; weights [T, Hi] float32, every scale folded in, of either sign; key_pages [pages, 1,
page_size, Di], any strides with contiguous rows (a layer of a page-major pool), keys in query's dtype; out [T, k]
int32. Positions count from 0 within t's sequence. Products are summed in float32. Of equal scores (0 and -0 are equal)
the lower position is the better one, so the result depends on nothing but the scores. A token that sees n <= k tokens
gets 0 .. n - 1, and one that sees none (a padded row) only -1.

`IndexPlan` says what each token sees. Its tensors are all that changes from step to step: a CUDA graph that was
captured over a plan computes what they hold when it is replayed.

Floor: every visible key read once, sum(visible) * Di elements where each sequence has one query.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from .dispatch import Impl, use_triton
from .uploads import upload_array

_REFERENCE_PRODUCTS = 2**24
"""Products query[t, h] . key[s] that the reference holds at a time."""


@dataclass(frozen=True)
class IndexPlan:
    """What the T query tokens of a batch of B sequences see, on the device, all int32."""

    page_size: int
    page_table: torch.Tensor  # [B, max_pages] page ids; any valid id beyond a sequence's end
    sequence: torch.Tensor  # [T] the row of page_table that each token reads
    visible: torch.Tensor  # [T] how many tokens it sees, itself included; 0 for a padded row

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        pages: Sequence[Sequence[int]],
        *,
        page_size: int,
        device: torch.device,
    ) -> Self:
        """The last query_lens[i] tokens of sequence i are queries; each sees the tokens up to and including itself.

        `pages[i]` may be longer than kv_lens[i] needs.
        """
        used = [ids[: -(-kv_len // page_size)] for ids, kv_len in zip(pages, kv_lens, strict=True)]
        for query_len, kv_len, ids in zip(query_lens, kv_lens, used, strict=True):
            if not 1 <= query_len <= kv_len <= len(ids) * page_size:
                raise ValueError(
                    f"a sequence of {query_len} queries and {kv_len} keys does not fit {len(ids)} pages of {page_size}"
                )
        batch, tokens = len(used), sum(query_lens)
        max_pages = max(len(ids) for ids in used)
        packed = np.zeros(batch * max_pages + 2 * tokens, dtype=np.int32)  # one copy to the device
        table, sequence, visible = np.split(packed, [batch * max_pages, batch * max_pages + tokens])
        for row, ids in zip(table.reshape(batch, max_pages), used, strict=True):
            row[: len(ids)] = ids
        sequence[:] = np.repeat(np.arange(batch), query_lens)
        visible[:] = np.concatenate(
            [np.arange(kv_len - query_len, kv_len) + 1 for query_len, kv_len in zip(query_lens, kv_lens, strict=True)]
        )
        flat = upload_array(packed, device)
        on_device = flat.split_with_sizes([len(table), tokens, tokens])
        return cls(page_size, on_device[0].view(batch, max_pages), on_device[1], on_device[2])

    @classmethod
    def padded(cls, tokens: int, *, max_pages: int, page_size: int, device: torch.device) -> Self:
        """Room for up to `tokens` sequences of one query each, to be filled in place; until then nobody sees anything.

        Row t of the page table belongs to token t. This is the plan of a decode graph.
        """
        table = torch.zeros(tokens, max_pages, dtype=torch.int32, device=device)
        sequence = torch.arange(tokens, dtype=torch.int32, device=device)
        return cls(page_size, table, sequence, torch.zeros(tokens, dtype=torch.int32, device=device))

    @property
    def tokens(self) -> int:
        return len(self.sequence)

    @property
    def max_visible(self) -> int:
        """What the page table has room for; no token sees more."""
        return self.page_table.shape[1] * self.page_size


def index_scores_reference(
    query: torch.Tensor, weights: torch.Tensor, key_pages: torch.Tensor, plan: IndexPlan
) -> torch.Tensor:
    """[T, max_visible] float32 scores, -inf for tokens that are not visible."""
    scores = torch.full((plan.tokens, plan.max_visible), -torch.inf, device=query.device)
    for sequence in set(plan.sequence.tolist()):
        tokens = (plan.sequence == sequence).nonzero().flatten()
        seen = int(plan.visible[tokens].max())
        if seen == 0:
            continue
        pages = plan.page_table[sequence, : -(-seen // plan.page_size)]
        keys = key_pages[pages.long(), 0].flatten(0, 1)[:seen].float()
        at_once = max(_REFERENCE_PRODUCTS // (query.shape[1] * seen), 1)
        for start in range(0, len(tokens), at_once):
            some = tokens[start : start + at_once]
            products = torch.relu(query[some].float() @ keys.T)  # [n, Hi, seen]
            scores[some, :seen] = (weights[some].unsqueeze(1) @ products).squeeze(1)
    positions = torch.arange(plan.max_visible, device=query.device)
    return scores.masked_fill_(positions >= plan.visible.unsqueeze(1), -torch.inf)


def select_top_reference(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """[T, k] positions of the best scores of each row among its first `visible`, ascending, then -1."""
    positions = torch.arange(scores.shape[1], device=scores.device)
    scores = scores.masked_fill(positions >= visible.unsqueeze(1), -torch.inf)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]  # stable: the lower position comes first
    unseen = best >= visible.unsqueeze(1)
    ascending = best.masked_fill(unseen, scores.shape[1]).sort(dim=1).values
    out = torch.full((len(scores), k), -1, dtype=torch.int32, device=scores.device)
    out[:, : best.shape[1]] = ascending.masked_fill(ascending == scores.shape[1], -1)
    return out


def index_topk_reference(
    query: torch.Tensor, weights: torch.Tensor, key_pages: torch.Tensor, plan: IndexPlan, k: int
) -> torch.Tensor:
    return select_top_reference(index_scores_reference(query, weights, key_pages, plan), plan.visible, k)


def position_rows_reference(positions: torch.Tensor, plan: IndexPlan) -> torch.Tensor:
    position = positions.clamp(min=0).long()
    page = plan.page_table[plan.sequence.long().unsqueeze(1), position // plan.page_size]
    return torch.where(positions < 0, positions, (page * plan.page_size + position % plan.page_size).int())


def index_topk(
    query: torch.Tensor,
    weights: torch.Tensor,
    key_pages: torch.Tensor,
    plan: IndexPlan,
    k: int,
    *,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Choose k positions for every token; see the module docstring."""
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
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if not use_triton(impl, query.device):
        return index_topk_reference(query, weights, key_pages, plan, k)
    if query.stride()[1:] != (dim, 1) or key_pages.stride(-1) != 1 or weights.stride(1) != 1:
        raise ValueError(
            f"query has strides {query.stride()}, weights {weights.stride()}, key pages {key_pages.stride()}: "
            "heads and keys must be contiguous"
        )
    from .index_topk_triton import launch_index_topk

    out = torch.empty(tokens, k, dtype=torch.int32, device=query.device)
    launch_index_topk(query, weights, key_pages, plan, out)
    return out


def position_rows(positions: torch.Tensor, plan: IndexPlan, *, impl: Impl = "auto") -> torch.Tensor:
    """The flat rows page * page_size + offset, int32, of `positions` [T, k] in each token's sequence; -1 stays -1."""
    if positions.ndim != 2 or len(positions) != plan.tokens or positions.dtype != torch.int32:
        raise ValueError(
            f"{positions.dtype} positions {list(positions.shape)} do not fit a plan of {plan.tokens} tokens"
        )
    if not use_triton(impl, positions.device):
        return position_rows_reference(positions, plan)
    from .index_topk_triton import launch_position_rows

    rows = torch.empty(positions.shape, dtype=torch.int32, device=positions.device)
    launch_position_rows(positions, plan, rows)
    return rows
