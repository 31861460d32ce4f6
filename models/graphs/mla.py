"""The decode and prefill steps of a decoder with dense latent attention for CUDA graphs: the page table and the
attention plan change from step to step.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...common.arithmetic import ceil_div
from ...kernels.mla.tile_plan import (
    PIECE_FIELDS,
    SPLIT_FIELDS,
    IntArray,
    TilePlan,
    cut_tiles,
    most_partials,
    most_pieces,
    most_splits,
    tile_tokens,
    tiles_at_once,
)
from ...memory.kv_pool import KvCache
from ..decoders.mla import MlaDecoder
from ..layers.batch import SequenceSlice
from .inputs import PageTable, fill_table, pages_in_use, token_batch
from .steps import ChunkLimits, Chunks, SingleTokens


class _PlanSections:
    """The sections of an input buffer that hold a TilePlan. In the page table, sequence i has row i, of `max_pages`
    ids.
    """

    def __init__(
        self, decoder: MlaDecoder, cache: KvCache, max_tiles: int, max_pages: int, *, decode_only: bool
    ) -> None:
        self._page_size, self._max_pages = cache.page_size, max_pages
        self._at_once = tiles_at_once(decoder.num_heads, cache.device)
        self.tile_tokens = tile_tokens(decoder.num_heads, decode_only=decode_only, at_once=self._at_once)
        self.sizes = {
            "pieces": PIECE_FIELDS * most_pieces(max_tiles, self._at_once),
            "splits": SPLIT_FIELDS * most_splits(max_tiles, self._at_once),
        }

    def fill(self, host: Mapping[str, IntArray], query_lens: IntArray, kv_lens: IntArray) -> None:
        page_starts = (np.arange(len(query_lens)) * self._max_pages).astype(np.int32)
        found = cut_tiles(query_lens, kv_lens, page_starts, tile_tokens=self.tile_tokens, at_once=self._at_once)
        for name, entries in zip(self.sizes, found, strict=True):
            fill_table(host[name], entries)

    def plan(self, parts: Mapping[str, torch.Tensor], tokens: int, tiles: int) -> TilePlan:
        """For `tokens` tokens in at most `tiles` tiles."""
        return TilePlan(
            tokens=tokens,
            page_size=self._page_size,
            tile_tokens=self.tile_tokens,
            pages=parts["pages"],
            pieces=parts["pieces"].view(PIECE_FIELDS, -1)[:, : most_pieces(tiles, self._at_once)],
            splits=parts["splits"].view(SPLIT_FIELDS, -1)[:, : most_splits(tiles, self._at_once)],
            num_partials=most_partials(tiles, self._at_once),
        )


class MlaStep(SingleTokens):
    """Decode steps over one cache; see capture.GraphedStep."""

    def __init__(self, decoder: MlaDecoder, cache: KvCache, *, max_batch: int, max_pages: int) -> None:
        self._decoder = decoder
        self._plan = _PlanSections(decoder, cache, max_batch, max_pages, decode_only=True)
        super().__init__(cache, self._plan.sizes, max_batch=max_batch, max_pages=max_pages)
        self._table = PageTable(self._inputs.host["pages"], max_batch, max_pages)

    def hidden(self, size: int, _kind: int = 0, received: torch.Tensor | None = None, /) -> torch.Tensor:
        parts = self._inputs.device
        batch, plan = token_batch(parts, size), self._plan.plan(parts, size, size)
        return self._decoder.hidden(batch, self._cache, hidden=received, live_rows=parts["live_rows"], plan=plan)

    def fill(self, slices: Sequence[SequenceSlice], size: int) -> int:
        """Padded rows see no tokens."""
        used = pages_in_use(slices, self._cache.page_size)
        kv_lens = np.zeros(size, dtype=np.int32)
        kv_lens[: len(slices)] = [piece.end for piece in slices]
        self._fill_tokens(slices, size)
        self._plan.fill(self._inputs.host, np.ones(size, dtype=np.int32), kv_lens)
        self._inputs.upload(self._table.fill(slices, used))
        return 0


class MlaChunkStep(Chunks):
    """Steps of chunks over one cache; see capture.GraphedStep."""

    def __init__(self, decoder: MlaDecoder, cache: KvCache, limits: ChunkLimits) -> None:
        self._decoder = decoder
        self._plan = _PlanSections(decoder, cache, limits.max_tokens, limits.max_pages, decode_only=False)
        super().__init__(cache, self._plan.sizes, limits)

    def fill(self, slices: Sequence[SequenceSlice], size: int) -> int:
        """Padded rows see no tokens."""
        lengths, used = [len(piece.token_ids) for piece in slices], pages_in_use(slices, self._cache.page_size)
        self._fill_chunks(slices, size)
        self._plan.fill(
            self._inputs.host,
            np.array([*lengths, size - sum(lengths)], dtype=np.int32),
            np.array([*(piece.end for piece in slices), 0], dtype=np.int32),
        )
        self._upload_table(slices, used)
        return 0

    def hidden(self, size: int, _kind: int = 0, received: torch.Tensor | None = None, /) -> torch.Tensor:
        parts, last_rows = self._inputs.device, self._last_rows(size)
        # the last tile of each slice, and of the padding, may be short
        tiles = min(ceil_div(size, self._plan.tile_tokens) + len(last_rows) + 1, size)
        return self._decoder.hidden(
            token_batch(parts, size, last_rows=last_rows),
            self._cache,
            hidden=received,
            live_rows=parts["live_rows"],
            last_only=self._last_only,
            plan=self._plan.plan(parts, size, tiles),
        )
