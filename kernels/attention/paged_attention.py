"""Causal grouped-query attention of a ragged batch over a paged KV cache.

The last query_lens[i] tokens of sequence i are queries, and kv_lens[i] tokens, including those, are in its pages. The
query at row r of sequence i is at position p = kv_lens[i] - query_lens[i] + r and sees the keys [0, p]:

    out[i, r, h] = sum_{j <= p} softmax_j(scale * query[i, r, h] . key[i, j, g]) value[i, j, g],   g = h // (Hq / Hkv)

With a sliding window W, the query sees only the keys (p - W, p], and pages that hold only earlier keys are not read.
With `sinks`, [Hq] float32, softmax_j has one more term in its denominator, exp(sinks[h]), like a key with this score
and the value 0.

Shapes: query [tokens, Hq, D], the sequences' rows one after another; key_pages, value_pages [pages, Hkv, page_size, D],
any strides (a layer of a page-major pool), token j of a sequence is in its page j // page_size at j % page_size;
out as query. Rows of a page beyond a sequence's end may hold anything, including NaN, from an earlier sequence.
Pages have the dtype of query, or float8_e4m3fn: then keys and values are converted to that of query when read.

The plan of a batch is made once and used by every layer with the same window: `WorkPlan` for the Triton kernels and the
CUDA kernel of paged_prefill_cuda.py, else `GatherPlan`, for torch or, for sequences of one query, the Numba kernel.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..backends.dispatch import Impl, launcher, use_numba, use_triton
from ..backends.half_products import computes_in
from .attention_plan import WorkPlan, make_work_plan
from .gather_plan import DecodeGroup, GatherPlan, PageTable, PrefillSequence, make_gather_plan
from .kv_write import can_store
from .used_pages import used_pages

AttentionPlan = GatherPlan | WorkPlan


def plan_attention(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    pages: Sequence[Sequence[int]],
    *,
    page_size: int,
    num_kv_heads: int,
    device: torch.device,
    num_heads: int | None = None,
    window: int | None = None,
    impl: Impl = "auto",
) -> AttentionPlan:
    """Plan a batch for `impl`, for layers with this sliding `window`. `pages[i]` may be longer than kv_lens[i] needs.
    `num_heads` is the number of query heads, by default that of KV heads; it affects only the speed.
    """
    used = used_pages(query_lens, kv_lens, pages, page_size)
    if impl != "numba" and use_triton(impl, device):
        return make_work_plan(
            query_lens,
            kv_lens,
            used,
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            num_heads=num_heads or num_kv_heads,
            device=device,
            allow_cuda=impl == "auto",
            window=window,
        )
    return make_gather_plan(
        query_lens,
        kv_lens,
        used,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        device=device,
        window=window,
        impl=impl,
    )


def paged_attention_reference(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    plan: GatherPlan,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather pages and call torch's attention: one call for the decode rows, one per prefill sequence."""
    if not query.is_cuda and (wide := computes_in(query.dtype)) is not query.dtype:
        result = paged_attention_reference(query.to(wide), key_pages, value_pages, plan, scale=scale, sinks=sinks)
        return result.to(query.dtype)
    if len(plan.decode) == 1 and plan.decode[0].rows is None:
        return _attend_decode(query, key_pages, value_pages, plan.decode[0], scale, sinks)
    out = torch.empty_like(query)
    for group in plan.decode:
        assert group.rows is not None
        out[group.rows] = _attend_decode(query[group.rows], key_pages, value_pages, group, scale, sinks)
    _prefill_reference(query, key_pages, value_pages, plan, out, scale=scale, sinks=sinks)
    return out


def _prefill_reference(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    plan: GatherPlan,
    out: torch.Tensor,
    *,
    scale: float,
    sinks: torch.Tensor | None,
) -> None:
    for sequence in plan.prefill:
        rows = slice(sequence.row_start, sequence.row_end)
        out[rows] = _attend_prefill(query[rows], key_pages, value_pages, sequence, scale, sinks)


def _attend_decode(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    group: DecodeGroup,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    batch, num_heads, head_dim = query.shape
    if batch == 1 and sinks is None and query.device.type == "cpu" and query.dtype == torch.float32:
        return _attend_one(query, key_pages, value_pages, group, scale)
    # the query heads of one KV head take the axis of query positions, so KV heads are not repeated in memory
    kv_heads = key_pages.shape[1]
    grouped = query.view(batch, kv_heads, num_heads // kv_heads, head_dim)
    key, value = _gather(key_pages, value_pages, group.table, group.first, group.kv_len, query.dtype)
    mask = group.mask
    if sinks is not None:
        key, value, mask = _with_sink(key, value, mask, sinks.view(1, kv_heads, -1, 1), query.dtype)
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    return out.reshape(batch, num_heads, head_dim)


def _attend_one(
    query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, group: DecodeGroup, scale: float
) -> torch.Tensor:
    """One sequence on the CPU: at this size call overhead dominates, and this needs the fewest calls."""
    kv_heads, head_dim = key_pages.shape[1], key_pages.shape[3]
    pages = group.table.adjacent
    if pages is None:
        gathered = _gather(key_pages, value_pages, group.table, group.first, group.kv_len, query.dtype)
        keys, values = (part[0] for part in gathered)
    else:
        keys, values = (
            part[pages].transpose(0, 1).to(query.dtype).reshape(kv_heads, -1, head_dim)[:, group.first : group.kv_len]
            for part in (key_pages, value_pages)
        )
    scores = torch.bmm(query.view(kv_heads, -1, head_dim) * scale, keys.transpose(1, 2))
    return torch.bmm(scores.softmax(-1), values).view(query.shape)


def _attend_prefill(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    sequence: PrefillSequence,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    key, value = _gather(key_pages, value_pages, sequence.table, 0, sequence.kv_len, query.dtype)
    mask = sequence.mask
    if sinks is not None:
        if mask is None:
            mask = torch.ones(len(query), sequence.kv_len, dtype=torch.bool, device=query.device).tril()[None, None]
        key, value, mask = _with_sink(key, value, mask, sinks.view(1, -1, 1, 1), query.dtype)
    out = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key_pages.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


def _with_sink(
    key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values [B, H, n, D] with a zero row appended, and a mask that is added to the scores: it gives the
    appended row the score of `sinks`.
    """
    key, value = (torch.nn.functional.pad(rows, (0, 0, 0, 1)) for rows in (key, value))
    seen = torch.ones(1, 1, 1, key.shape[2] - 1, dtype=torch.bool, device=key.device) if mask is None else mask
    scores = torch.zeros(seen.shape, dtype=torch.float32, device=key.device).masked_fill_(~seen, -torch.inf)
    shape = (scores[..., :1] + sinks).shape[:-1]
    return key, value, torch.cat((scores.expand(*shape, -1), sinks.expand(*shape, 1)), dim=-1).to(dtype)


def _gather(
    key_pages: torch.Tensor, value_pages: torch.Tensor, table: PageTable, first: int, kv_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [first, kv_len) of a table's sequences, [B, H, kv_len - first, D] of `dtype`, in one copy of both
    if the pool allows it.

    In a page-major pool a page's values are a whole number of blocks behind its keys, so both are rows of one matrix.
    Copying rows of a matrix is two to four times as fast as indexing over two dimensions.
    """
    num_pages, num_heads, page_size, head_dim = key_pages.shape
    block = page_size * head_dim  # elements of one head in one page
    per_page, rest = divmod(key_pages.stride(0), block)
    distance, odd = divmod(int(value_pages.storage_offset()) - int(key_pages.storage_offset()), block)
    one_pool = key_pages.untyped_storage().data_ptr() == value_pages.untyped_storage().data_ptr()
    blocky = key_pages.stride() == value_pages.stride() and key_pages.stride()[1:] == (block, head_dim, 1)
    if not (one_pool and blocky and distance > 0) or rest or odd:
        rows = torch.stack([pages[table.pages, table.heads] for pages in (key_pages, value_pages)])
    else:
        matrix = key_pages.as_strided(((num_pages - 1) * per_page + distance + num_heads, block), (block, 1))
        rows = matrix.index_select(0, table.blocks(per_page, distance))
    rows = rows.to(dtype)
    if table.unseen is not None:
        rows.view(-1, head_dim).index_fill_(0, table.unseen, 0.0)
    key, value = rows.view(2, len(table.pages), num_heads, -1, head_dim)[:, :, :, first:kv_len]
    return key, value


def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
    last_only: bool = False,
) -> torch.Tensor:
    """Attention of the batch that `plan` describes, by the plan's implementation; see the module docstring. With
    `last_only`, only the last row of each sequence is defined.
    """
    check_attention(query, key_pages, value_pages, plan, sinks)
    if isinstance(plan, GatherPlan):
        if not plan.decoding or not use_numba(plan.impl, query, pages=(key_pages, value_pages)):
            return paged_attention_reference(query, key_pages, value_pages, plan, scale=scale, sinks=sinks)
        out = torch.empty_like(query)
        launch = launcher("numba.paged_decode", "launch_decode")
        launch(query, key_pages, value_pages, plan.decode_rows, out, scale=scale, sinks=sinks)
        _prefill_reference(query, key_pages, value_pages, plan, out, scale=scale, sinks=sinks)
        return out
    if (
        key_pages.stride() != value_pages.stride()
        or key_pages.stride(-1) != 1
        or query.stride()[1:] != (query.shape[2], 1)
    ):
        raise ValueError(
            f"query has strides {query.stride()}, key pages {key_pages.stride()}, value pages {value_pages.stride()}: "
            "heads must be contiguous, and both page tensors alike"
        )
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if plan.pieces.shape[1]:
        launcher("attention.paged_decode_triton", "launch_decode")(
            query, key_pages, value_pages, plan, out, scale=scale, sinks=sinks
        )
    if plan.tiles.tiles.shape[1]:
        launcher("attention.paged_prefill_triton", "launch_prefill")(
            query, key_pages, value_pages, plan, out, scale=scale, sinks=sinks, last_only=last_only
        )
    return out


def check_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    plan: AttentionPlan,
    sinks: torch.Tensor | None,
) -> None:
    """Raise ValueError if the tensors do not fit each other or the plan."""
    _, kv_heads, page_size, head_dim = key_pages.shape
    if value_pages.shape != key_pages.shape or page_size != plan.page_size or kv_heads != plan.num_kv_heads:
        raise ValueError(
            f"key pages {list(key_pages.shape)} and value pages {list(value_pages.shape)} do not fit a plan of "
            f"{plan.num_kv_heads} heads and page size {plan.page_size}"
        )
    if query.ndim != 3 or query.shape[0] != plan.tokens or query.shape[1] % kv_heads or query.shape[2] != head_dim:
        raise ValueError(
            f"query {list(query.shape)} does not fit {plan.tokens} tokens over {kv_heads} KV heads of {head_dim}"
        )
    if sinks is not None and (sinks.shape != query.shape[1:2] or sinks.dtype != torch.float32):
        raise ValueError(
            f"sinks {sinks.dtype} {list(sinks.shape)} must be float32, one for each of {query.shape[1]} heads"
        )
    if not can_store(key_pages.dtype, query.dtype) or key_pages.dtype != value_pages.dtype:
        raise ValueError(f"query is {query.dtype}, the pages are {key_pages.dtype} and {value_pages.dtype}")
