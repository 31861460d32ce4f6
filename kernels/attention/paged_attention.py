"""Causal grouped-query attention of a ragged batch over a paged KV cache.

The last query_lens[i] tokens of sequence i are queries, and kv_lens[i] tokens, including those, are in its pages. The
query at row r of sequence i is at position p = kv_lens[i] - query_lens[i] + r and sees the keys [0, p]:

    out[i, r, h] = sum_{j <= p} softmax_j(scale * query[i, r, h] . key[i, j, g]) value[i, j, g],   g = h // (Hq / Hkv)

With a sliding window W it sees only (p - W, p], and pages that hold only earlier keys are not read.

Shapes: query [tokens, Hq, D], the sequences' rows one after another; key_pages, value_pages [pages, Hkv, page_size, D],
any strides (a layer of a page-major pool), token j of a sequence is in its page j // page_size at j % page_size;
out as query. Rows of a page beyond a sequence's end may hold anything, including NaN, from an earlier sequence.
Pages have the dtype of query, or float8_e4m3fn: then keys and values are converted to that of query when read.

The plan of a batch is made once and used by every layer with the same window: `WorkPlan` for the Triton kernels and the
CUDA kernel of paged_prefill_cuda.py, else `GatherPlan`, for torch or, for sequences of one query, the Numba kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from ...configs.arithmetic import ceil_div
from ..backends.dispatch import Impl, launcher, use_numba, use_triton
from .attention_plan import WorkPlan, make_work_plan
from .kv_write import can_store


class PageTable:
    """The pages of some sequences, padded to one length, for all heads: [B, H, P] blocks of [page_size, D] to gather.

    Block indices depend on the pool's strides, which are the same for every layer, so they are computed once. With
    `unseen`, [B, P * page_size] bool on the CPU, rows beyond a sequence's end are gathered as zeros: the mask gives
    them the weight 0, and 0 * NaN is NaN.
    """

    def __init__(
        self,
        pages: Sequence[tuple[int, ...]],
        num_kv_heads: int,
        device: torch.device,
        unseen: torch.Tensor | None = None,
    ) -> None:
        self.pages = torch.tensor(pages, dtype=torch.long, device=device).unsqueeze(1)  # [B, 1, P]
        self.heads = torch.arange(num_kv_heads, device=device).unsqueeze(1)  # [H, 1]
        self._blocks: dict[tuple[int, int], torch.Tensor] = {}
        first, last = pages[0][0], pages[0][-1]
        alone = len(pages) == 1 and pages[0] == tuple(range(first, last + 1))
        self.adjacent = slice(first, last + 1) if alone else None
        """The pages of a single sequence, if they are adjacent."""
        self.unseen: torch.Tensor | None = None
        """Rows to be zeroed, among the rows of keys and then of values, [2, B, H, P * page_size] flattened."""
        if unseen is not None:
            everywhere = unseen.unsqueeze(1).expand(2, -1, num_kv_heads, -1)
            self.unseen = everywhere.flatten().nonzero().squeeze(1).to(device)

    def blocks(self, per_page: int, value_distance: int) -> torch.Tensor:
        """[2 * B * H * P] indices of the key blocks, then of the value blocks `value_distance` behind them."""
        found = self._blocks.get((per_page, value_distance))
        if found is None:
            keys = (self.pages * per_page + self.heads).flatten()
            found = self._blocks[per_page, value_distance] = torch.cat((keys, keys + value_distance))
        return found


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences of one query each, computed together. `mask` is None if all see the keys [first, kv_len)."""

    rows: torch.Tensor | None  # [B] rows of `query`; None means all of them, in order
    table: PageTable  # padded with each sequence's last page
    mask: torch.Tensor | None  # [B, 1, 1, kv_len] bool, True where the key is seen
    first: int  # 0 with a mask
    kv_len: int  # of the longest


@dataclass(frozen=True)
class PrefillSequence:
    """One sequence of several queries. `mask` is None if no keys precede them: plain causal attention."""

    row_start: int
    row_end: int
    kv_len: int
    table: PageTable  # of the one sequence
    mask: torch.Tensor | None  # [1, 1, query_len, kv_len] bool


class DecodingSequence(NamedTuple):
    """A sequence of one query: its row and the pages that it reads. Keys are counted from the first of these pages."""

    row: int
    first: int  # key that it sees
    kv_len: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class DecodeRows:
    """B sequences of one query each, for the Numba kernel; all int64 and contiguous."""

    rows: torch.Tensor  # [B] rows of `query`
    firsts: torch.Tensor  # [B]
    kv_lens: torch.Tensor  # [B]
    page_starts: torch.Tensor  # [B], index of each sequence's first page in `pages`
    pages: torch.Tensor
    longest: int  # of the numbers of keys


@dataclass(frozen=True)
class GatherPlan:
    """A batch for torch and the Numba kernel. Parts that only one of them needs are made on first use."""

    impl: Impl
    device: torch.device
    tokens: int
    page_size: int
    num_kv_heads: int
    decoding: tuple[DecodingSequence, ...]
    prefill: tuple[PrefillSequence, ...]

    @cached_property
    def decode(self) -> tuple[DecodeGroup, ...]:
        """The sequences of one query, for torch."""
        return tuple(
            _decode_group(group, self.tokens, self.page_size, self.num_kv_heads, self.device)
            for group in _similar_lengths(self.decoding)
        )

    @cached_property
    def decode_rows(self) -> DecodeRows:
        """The sequences of one query, for Numba."""
        kv_lens = [sequence.kv_len for sequence in self.decoding]
        starts = [0, *accumulate(len(sequence.pages) for sequence in self.decoding)]
        return DecodeRows(
            rows=torch.tensor([sequence.row for sequence in self.decoding]),
            firsts=torch.tensor([sequence.first for sequence in self.decoding]),
            kv_lens=torch.tensor(kv_lens),
            page_starts=torch.tensor(starts[:-1]),
            pages=torch.tensor([page for sequence in self.decoding for page in sequence.pages]),
            longest=max(sequence.kv_len - sequence.first for sequence in self.decoding),
        )


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
    `num_heads` are the query heads; the default is as many as KV heads. It only matters for speed.
    """
    used = [tuple(ids[: ceil_div(kv_len, page_size)]) for ids, kv_len in zip(pages, kv_lens, strict=True)]
    for query_len, kv_len, ids in zip(query_lens, kv_lens, used, strict=True):
        if not 1 <= query_len <= kv_len <= len(ids) * page_size:
            raise ValueError(
                f"a sequence of {query_len} queries and {kv_len} keys does not fit {len(ids)} pages of {page_size}"
            )
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
    row_starts = [0, *accumulate(query_lens)]
    batch = list(zip(row_starts, query_lens, kv_lens, used, strict=False))
    return GatherPlan(
        impl=impl,
        device=device,
        tokens=row_starts[-1],
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        decoding=tuple(
            _decoding_sequence(row, kv_len, ids, page_size, window)
            for row, query_len, kv_len, ids in batch
            if query_len == 1
        ),
        prefill=tuple(
            _prefill_sequence(row, query_len, kv_len, ids, page_size, num_kv_heads, device, window)
            for row, query_len, kv_len, ids in batch
            if query_len > 1
        ),
    )


def _before_window(first_position: int, page_size: int, window: int | None) -> tuple[int, int]:
    """What the query at `first_position`, and all after it, do not see: the number of whole pages, and the keys of the
    next page.
    """
    return divmod(0 if window is None else max(0, first_position - window + 1), page_size)


def _decoding_sequence(
    row: int, kv_len: int, pages: tuple[int, ...], page_size: int, window: int | None
) -> DecodingSequence:
    unread, first = _before_window(kv_len - 1, page_size, window)
    return DecodingSequence(row, first, kv_len - unread * page_size, pages[unread:])


def _similar_lengths(sequences: Sequence[DecodingSequence]) -> list[list[DecodingSequence]]:
    """Group sequences so that padding at most doubles the gathered pages; one group if lengths are similar."""
    groups: list[list[DecodingSequence]] = []
    for sequence in sorted(sequences, key=lambda sequence: -len(sequence.pages)):
        if groups and 2 * len(sequence.pages) >= len(groups[-1][0].pages):
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    return [sorted(group) for group in groups]


def _decode_group(
    sequences: Sequence[DecodingSequence], tokens: int, page_size: int, num_kv_heads: int, device: torch.device
) -> DecodeGroup:
    rows, firsts, kv_lens, pages = zip(*sequences, strict=True)
    longest = max(len(ids) for ids in pages)
    padded = [ids + (ids[-1],) * (longest - len(ids)) for ids in pages]
    mask, unseen, first = None, None, firsts[0]
    if len(set(kv_lens)) > 1 or len(set(firsts)) > 1:
        keys = torch.arange(longest * page_size)
        unseen = keys >= torch.tensor(kv_lens).unsqueeze(1)
        unseen |= keys < torch.tensor(firsts).unsqueeze(1)
        mask, first = ~unseen[:, None, None, : max(kv_lens)].to(device), 0
    table = PageTable(padded, num_kv_heads, device, unseen)
    everything = rows == tuple(range(tokens))
    return DecodeGroup(None if everything else torch.tensor(rows, device=device), table, mask, first, max(kv_lens))


def _prefill_sequence(
    row_start: int,
    query_len: int,
    kv_len: int,
    pages: tuple[int, ...],
    page_size: int,
    num_kv_heads: int,
    device: torch.device,
    window: int | None,
) -> PrefillSequence:
    unread, _ = _before_window(kv_len - query_len, page_size, window)
    kv_len -= unread * page_size
    table = PageTable([pages[unread:]], num_kv_heads, device)
    mask = None
    if query_len < kv_len or (window is not None and window < kv_len):
        positions = torch.arange(kv_len - query_len, kv_len, device=device).unsqueeze(1)
        distance = positions - torch.arange(kv_len, device=device)
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        mask = seen[None, None]
    return PrefillSequence(row_start, row_start + query_len, kv_len, table, mask)


def paged_attention_reference(
    query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, plan: GatherPlan, *, scale: float
) -> torch.Tensor:
    """Gather pages and call torch's attention: one call for the decode rows, one per prefill sequence."""
    if len(plan.decode) == 1 and plan.decode[0].rows is None:
        return _attend_decode(query, key_pages, value_pages, plan.decode[0], scale)
    out = torch.empty_like(query)
    for group in plan.decode:
        assert group.rows is not None
        out[group.rows] = _attend_decode(query[group.rows], key_pages, value_pages, group, scale)
    _prefill_reference(query, key_pages, value_pages, plan, out, scale=scale)
    return out


def _prefill_reference(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    plan: GatherPlan,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    for sequence in plan.prefill:
        rows = slice(sequence.row_start, sequence.row_end)
        out[rows] = _attend_prefill(query[rows], key_pages, value_pages, sequence, scale)


def _attend_decode(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    group: DecodeGroup,
    scale: float,
) -> torch.Tensor:
    batch, num_heads, head_dim = query.shape
    if batch == 1 and query.device.type == "cpu" and query.dtype == torch.float32:
        return _attend_one(query, key_pages, value_pages, group, scale)
    # the query heads of one KV head take the axis of query positions, so KV heads are not repeated in memory
    kv_heads = key_pages.shape[1]
    grouped = query.view(batch, kv_heads, num_heads // kv_heads, head_dim)
    key, value = _gather(key_pages, value_pages, group.table, group.first, group.kv_len, query.dtype)
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=group.mask, scale=scale)
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
) -> torch.Tensor:
    key, value = _gather(key_pages, value_pages, sequence.table, 0, sequence.kv_len, query.dtype)
    out = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key,
        value,
        attn_mask=sequence.mask,
        is_causal=sequence.mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key_pages.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


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
    last_only: bool = False,
) -> torch.Tensor:
    """Attention of the batch that `plan` describes, by the plan's implementation; see the module docstring. With
    `last_only`, only the last row of each sequence is defined.
    """
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
    if not can_store(key_pages.dtype, query.dtype) or key_pages.dtype != value_pages.dtype:
        raise ValueError(f"query is {query.dtype}, the pages are {key_pages.dtype} and {value_pages.dtype}")
    if isinstance(plan, GatherPlan):
        if not plan.decoding or not use_numba(plan.impl, query, pages=(key_pages, value_pages)):
            return paged_attention_reference(query, key_pages, value_pages, plan, scale=scale)
        out = torch.empty_like(query)
        launch = launcher("numba.paged_decode", "launch_decode")
        launch(query, key_pages, value_pages, plan.decode_rows, out, scale=scale)
        _prefill_reference(query, key_pages, value_pages, plan, out, scale=scale)
        return out
    if key_pages.stride() != value_pages.stride() or key_pages.stride(-1) != 1 or query.stride()[1:] != (head_dim, 1):
        raise ValueError(
            f"query has strides {query.stride()}, key pages {key_pages.stride()}, value pages {value_pages.stride()}: "
            "heads must be contiguous, and both page tensors alike"
        )
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if plan.pieces.shape[1]:
        launcher("attention.paged_decode_triton", "launch_decode")(
            query, key_pages, value_pages, plan, out, scale=scale
        )
    if plan.tiles.tiles.shape[1]:
        launcher("attention.paged_prefill_triton", "launch_prefill")(
            query, key_pages, value_pages, plan, out, scale=scale, last_only=last_only
        )
    return out
