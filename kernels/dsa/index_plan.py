"""The tokens that the queries of a batch see, and the selection of the best tokens by score."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch

from ..attention.used_pages import used_pages
from ..backends.uploads import upload_array


@dataclass(frozen=True)
class IndexPlan:
    """What the T query tokens of a batch of B sequences see; on the device, all int32."""

    page_size: int
    page_table: torch.Tensor  # [B, max_pages] page ids; any valid id beyond a sequence's end
    sequence: torch.Tensor  # [T] the row of page_table that each token reads
    visible: torch.Tensor  # [T] how many tokens it sees, itself included; 0 for a padded row
    num_pages: int | None = None  # maximum pages in use by all sequences together; None if not known

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
        used = used_pages(query_lens, kv_lens, pages, page_size)
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
        num_pages = sum(len(ids) for ids in used)
        return cls(page_size, on_device[0].view(batch, max_pages), on_device[1], on_device[2], num_pages)

    def part(self, tokens: slice) -> Self:
        """What some of the tokens see."""
        return replace(self, sequence=self.sequence[tokens], visible=self.visible[tokens])

    def flat_rows(self, positions: torch.Tensor) -> torch.Tensor:
        """The flat rows page * page_size + offset, int32, of `positions` [T, k] in each token's sequence; -1 stays."""
        position = positions.clamp(min=0).long()
        page = self.page_table[self.sequence.long().unsqueeze(1), position // self.page_size]
        return torch.where(positions < 0, positions, (page * self.page_size + position % self.page_size).int())

    @property
    def tokens(self) -> int:
        return len(self.sequence)

    @property
    def max_visible(self) -> int:
        """Capacity of the page table in tokens; no token sees more."""
        return self.page_table.shape[1] * self.page_size

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """[B]: the largest of the `values` [T] of each sequence's tokens; 0 for a sequence without tokens."""
        none = torch.zeros(len(self.page_table), dtype=values.dtype, device=values.device)
        return none.scatter_reduce_(0, self.sequence.long(), values, "amax")


class IndexScales(NamedTuple):
    """Scales of fp8 queries [T, Hi] and keys [pages, 1, page_size, 1]; float32."""

    query: torch.Tensor
    keys: torch.Tensor


def select_top_reference(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """[T, k] positions of the best scores of each row among its first `visible`, ascending, then -1."""
    positions = torch.arange(scores.shape[1], device=scores.device)
    scores = scores.masked_fill(positions >= visible.unsqueeze(1), -torch.inf)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]  # stable: ties by position
    unseen = best >= visible.unsqueeze(1)
    ascending = best.masked_fill(unseen, scores.shape[1]).sort(dim=1).values
    out = torch.full((len(scores), k), -1, dtype=torch.int32, device=scores.device)
    out[:, : best.shape[1]] = ascending.masked_fill(ascending == scores.shape[1], -1)
    return out
