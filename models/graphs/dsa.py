"""The decode step of a sparse-attention decoder for CUDA graphs: the page table changes from step to step."""

from collections.abc import Sequence

import torch

from ...kernels.dsa.index_plan import IndexPlan
from ...memory.hisparse.cache import HiSparseCache
from ...memory.kv_pool import KvCache
from ..decoders.dsa import DsaDecoder
from ..layers.batch import SequenceSlice
from ..layers.hot_rows import all_resident
from .inputs import PageTable, pages_in_use, token_batch
from .steps import SingleTokens


class DsaStep(SingleTokens):
    """Steps of a sparse-attention decoder over one cache, paged or HiSparse; see capture.GraphedStep.

    With a HiSparse cache there is a second kind of step, in which all sequences are fully resident: it fetches nothing.
    """

    def __init__(self, decoder: DsaDecoder, cache: KvCache, *, max_batch: int, max_pages: int) -> None:
        sections = {"visible": max_batch, "hot_slots": max_batch}
        super().__init__(cache, sections, max_batch=max_batch, max_pages=max_pages)
        self._decoder = decoder
        self._kinds = 2 if isinstance(cache, HiSparseCache) else 1
        self._table = PageTable(self._inputs.host["pages"], max_batch, max_pages)
        self._rows = torch.arange(max_batch, dtype=torch.int32, device=cache.device)

    def hidden(self, size: int, kind: int = 0, received: torch.Tensor | None = None, /) -> torch.Tensor:
        parts = self._inputs.device
        table = parts["pages"].view(-1, self._max_pages)
        plan = IndexPlan(self._cache.page_size, table[:size], self._rows[:size], parts["visible"][:size])
        batch = token_batch(parts, size, hot_slots=parts["hot_slots"][:size], all_resident=kind == 1)
        return self._decoder.hidden(batch, self._cache, hidden=received, live_rows=parts["live_rows"], plan=plan)

    def fill(self, slices: Sequence[SequenceSlice], size: int) -> int:
        """Padded rows see no tokens."""
        host, live, used = self._inputs.host, len(slices), pages_in_use(slices, self._cache.page_size)
        self._fill_tokens(slices, size)
        host["visible"][:live] = [piece.end for piece in slices]
        host["visible"][live:size] = 0
        kind = 0
        if isinstance(self._cache, HiSparseCache):
            kind = int(all_resident(self._cache, slices))
            hot_slots = [piece.hot_slot for piece in slices if piece.hot_slot is not None]
            assert len(hot_slots) == live, "a sequence over a HiSparse cache has a hot slot"
            host["hot_slots"][:live] = hot_slots
            host["hot_slots"][live:size] = 0
        self._inputs.upload(self._table.fill(slices, used))
        return kind
