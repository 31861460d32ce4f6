"""The rows that sparse attention reads and writes: where a batch's tokens go, and where selected tokens are.

This is the seam at which memory hierarchies take over. A layer writes its tokens' rows and asks for those it has
selected; it does not care whether they lie in the pages of a pool, as here, or were fetched into a hot buffer.
"""

from typing import Protocol

import torch

from ..kernels.index_topk import IndexPlan, position_rows
from ..memory.kv_pool import KvPool
from .batch import ForwardBatch


class RowWriter:
    """Where the tokens of a batch go, in every pool of a cache."""

    def __init__(self, batch: ForwardBatch, live_rows: torch.Tensor | None) -> None:
        self._page_ids, self._offsets = batch.page_ids, batch.offsets
        self._live_rows = live_rows
        if live_rows is not None:
            # rows of a padded batch that are not real do what the last real one does: the same bytes, twice
            numbers = torch.arange(len(batch.page_ids), device=batch.page_ids.device)
            self._real = torch.minimum(numbers, live_rows - 1).clamp_(min=0)
            self._page_ids, self._offsets = self._page_ids[self._real], self._offsets[self._real]

    def write(self, pages: torch.Tensor, rows: torch.Tensor) -> None:
        """Put rows [T, D] into pages [P, S, D], in place. Nothing is written when no row is real."""
        if self._live_rows is not None:
            rows = torch.where(self._live_rows > 0, rows[self._real], pages[self._page_ids, self._offsets])
        pages[self._page_ids, self._offsets] = rows


class LatentRows(Protocol):
    """The latent rows of one batch's sequences; `layer` counts those of this rank."""

    def write(self, layer: int, rows: torch.Tensor) -> None:
        """Keep the new tokens' rows [T, D]."""

    def select(self, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where to find the tokens at `positions` [T, K] (int32, -1 for none) of each token's sequence.

        Returns pages [P, S, D], strided, and rows [T, K] int32 in them: page * S + slot, -1 for none. Valid until the
        next call.
        """

    def reselect(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of the last `select`, in another layer."""


class PagedLatentRows:
    """All rows are in the pages of a pool: a look-up in the page table is all it takes."""

    def __init__(self, pool: KvPool, plan: IndexPlan, writer: RowWriter) -> None:
        self._pool = pool
        self._plan = plan
        self._writer = writer
        self._rows: torch.Tensor | None = None

    def write(self, layer: int, rows: torch.Tensor) -> None:
        self._writer.write(self._pages(layer), rows)

    def select(self, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._rows = position_rows(positions, self._plan)
        return self._pages(layer), self._rows

    def reselect(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._rows is not None, "a stage starts with a layer that selects"
        return self._pages(layer), self._rows

    def _pages(self, layer: int) -> torch.Tensor:
        (pages,) = self._pool.layer(layer)
        return pages.squeeze(1)
