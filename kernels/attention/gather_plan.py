"""The work of one attention call for torch and the Numba kernel (paged_attention.py): planned once per step.

Sequences of one query are grouped by length, sequences of several queries are computed one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from ..backends.dispatch import Impl


class PageTable:
    """The pages of some sequences, padded to one length, for all heads: [B, H, P] blocks of [page_size, D] to gather.

    Block indices depend on the pool's strides, which are the same for every layer, so they are computed once. With
    `unseen`, [B, P * page_size] bool on the CPU, rows beyond a sequence's end or before its window are gathered as
    zeros: the mask gives them the weight 0, and 0 * NaN is NaN.
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
    """One sequence of several queries. `mask` is None for plain causal attention: no keys precede them, and a window
    holds all keys.
    """

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


def make_gather_plan(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    pages: Sequence[tuple[int, ...]],
    *,
    page_size: int,
    num_kv_heads: int,
    device: torch.device,
    window: int | None,
    impl: Impl,
) -> GatherPlan:
    """Plan a batch. `pages[i]` holds exactly the pages of kv_lens[i]."""
    row_starts = [0, *accumulate(query_lens)]
    batch = list(zip(row_starts, query_lens, kv_lens, pages, strict=False))
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
    """The keys before the window of the query at `first_position`: the number of whole pages, and of keys in the next
    page. Later queries do not see them either.
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
