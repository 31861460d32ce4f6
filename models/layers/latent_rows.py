"""The rows that sparse attention reads and writes: where a batch's tokens go, and where selected tokens are.

This is the seam at which memory hierarchies take over. A layer writes its tokens' rows and asks for those it has
selected; it does not care whether they lie in the pages of a pool, as here, or were fetched into a hot buffer. In a
CUDA graph the calls are made once, at capture: what they return must stay in place, and what they launch must not
depend on values that only the host knows.
"""

from typing import NamedTuple, Protocol

import torch

from ...kernels.hisparse.slot_tables import KvRows
from ...kernels.mla.index_plan import IndexPlan
from ...kernels.mla.index_topk import position_rows
from ...memory.kv_pool import KvPool
from .batch import ForwardBatch


class RowPlaces(NamedTuple):
    """Rows of a layer: pages [P, S, D], strided, and flat row numbers in them, page * S + slot, int32; -1 for none."""

    pages: torch.Tensor
    rows: torch.Tensor


def new_token_rows(batch: ForwardBatch, page_size: int, live_rows: torch.Tensor | None) -> KvRows:
    """[T] int32: the flat rows where the tokens of a batch go in every paged pool; -1 for padding, which is whatever
    comes after the first `live_rows` tokens.
    """
    rows = (batch.page_ids * page_size + batch.offsets).int()
    if live_rows is not None:
        rows.masked_fill_(torch.arange(len(rows), device=rows.device) >= live_rows, -1)
    return KvRows(rows)


class LatentRows(Protocol):
    """The latent rows of one batch's sequences; `layer` counts those of this rank.

    Of each layer in turn: `place`; `select`, if it selects; `selected`. Rows that were placed count as written by then.
    After the last layer: `finish`. What is computed between `select` and `selected` runs beside what brings rows in.
    """

    fetches: bool
    """Whether rows are brought in beside what is computed meanwhile."""

    def place(self, layer: int) -> RowPlaces:
        """Where the new tokens' rows [T] are to be written."""

    def select(self, layer: int, positions: torch.Tensor, /) -> None:
        """The tokens at `positions` [T, K] (int32, -1 for none) of each token's sequence are read in this layer, and in
        those after it that do not select.
        """

    def selected(self, layer: int) -> RowPlaces:
        """Where those are in this layer, rows [T, K]; valid until the next `select`."""

    def finish(self) -> None:
        """New rows are where later batches will look for them."""


class PagedLatentRows:
    """All rows are in the pages of a pool: a look-up in the page table is all it takes."""

    fetches = False

    def __init__(self, pool: KvPool, plan: IndexPlan, new_rows: KvRows) -> None:
        self._pool = pool
        self._plan = plan
        self._new_rows = new_rows
        self._selected: torch.Tensor | None = None

    def place(self, layer: int) -> RowPlaces:
        return RowPlaces(self._pages(layer), self._new_rows)

    def select(self, _layer: int, positions: torch.Tensor, /) -> None:
        self._selected = position_rows(positions, self._plan)

    def selected(self, layer: int) -> RowPlaces:
        assert self._selected is not None, "a stage starts with a layer that selects"
        return RowPlaces(self._pages(layer), self._selected)

    def finish(self) -> None:
        pass

    def _pages(self, layer: int) -> torch.Tensor:
        (pages,) = self._pool.layer(layer)
        return pages.squeeze(1)
