"""The rows that sparse attention reads and writes: the places of a batch's new rows, and of the selected rows.

This is the interface to the memory hierarchy: a layer writes its new rows and requests the selected rows. These are in
the pages of a pool (in this module) or in a hot buffer (hot_rows.py). In a CUDA graph the calls are made once, at
capture, so results must stay at fixed addresses, and launches must not depend on values that only the host knows.
"""

from typing import NamedTuple, Protocol

import torch

from ...kernels.dsa.index_plan import IndexPlan
from ...kernels.hisparse.slot_tables import KvRows
from ...memory.kv_pool import KvPool
from .batch import ForwardBatch
from .unpacked_pages import PackedFormat, UnpackedPages


class RowPlaces(NamedTuple):
    """Rows of a layer: pages [P, S, D], strided, and flat row numbers in them, page * S + slot, int32; -1 for none."""

    pages: torch.Tensor
    rows: torch.Tensor


def new_token_rows(batch: ForwardBatch, page_size: int, live_rows: torch.Tensor | None) -> KvRows:
    """[T] int32: the flat rows of a batch's new tokens in every paged pool; -1 for padding, which starts after the
    first `live_rows` tokens.
    """
    rows = (batch.page_ids * page_size + batch.offsets).int()
    if live_rows is not None:
        rows.masked_fill_(torch.arange(len(rows), device=rows.device) >= live_rows, -1)
    return KvRows(rows)


def latent_pages(pool: KvPool, layer: int) -> torch.Tensor:
    """The latent rows of a layer of this rank, [pages, page_size, D]."""
    (pages,) = pool.layer(layer)
    return pages.squeeze(1)


class LatentRows(Protocol):
    """The latent rows of one batch's sequences; `layer` counts the layers of this rank.

    Calls per layer, in order: `place`; `select`, if the layer selects; `selected`. The caller writes the placed rows
    before it calls `selected`. After the last layer: `finish`. Work between `select` and `selected` runs concurrently
    with fetches.
    """

    rows_of: IndexPlan | None
    """The plan whose page table has all rows; None if rows have to be fetched."""

    def place(self, layer: int) -> RowPlaces:
        """Where to write the new tokens' rows [T]."""

    def select(self, layer: int, tokens: torch.Tensor, /) -> None:
        """Select tokens [T, K] of each token's sequence, for this layer and the following ones that do not select: flat
        rows of `rows_of`, or positions if there is none; int32, -1 for no token.
        """

    def selected(self, layer: int) -> RowPlaces:
        """The places of the selected rows [T, K] of this layer; valid until the next `select`. If the queries of a step
        share packed pages (unpacked_pages.py), the pages are unpacked here.
        """

    def finish(self) -> None:
        """Make new rows visible to later batches."""


class PagedLatentRows:
    """All rows are in the pages of a pool: only a lookup in the page table is needed."""

    def __init__(self, pool: KvPool, plan: IndexPlan, new_rows: KvRows, packed: PackedFormat | None = None) -> None:
        """`packed` is the format of packed rows, or None."""
        self._pool = pool
        self._unpacked: UnpackedPages | None = None
        if packed is not None and packed.shares_pages(plan):
            self._unpacked = UnpackedPages(plan, plan.page_table, packed)
            plan = self._unpacked.plan
        self.rows_of: IndexPlan | None = plan
        self._new_rows = new_rows
        self._selected: torch.Tensor | None = None

    def place(self, layer: int) -> RowPlaces:
        return RowPlaces(latent_pages(self._pool, layer), self._new_rows)

    def select(self, _layer: int, tokens: torch.Tensor, /) -> None:
        self._selected = tokens

    def selected(self, layer: int) -> RowPlaces:
        assert self._selected is not None, "a stage starts with a layer that selects"
        pages = latent_pages(self._pool, layer)
        return RowPlaces(self._unpacked.of_layer(pages) if self._unpacked else pages, self._selected)

    def finish(self) -> None:
        pass
