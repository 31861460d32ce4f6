"""The decode and prefill steps of a decoder with dense latent attention for CUDA graphs: the page table and the
attention plan change from step to step.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...configs.arithmetic import ceil_div
from ...kernels.dense_mla.tile_plan import (
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
from .inputs import (
    SLICE_SECTIONS,
    TOKEN_SECTIONS,
    InputBuffer,
    PageTable,
    chunks_size,
    decode_size,
    fill_chunks,
    fill_tokens,
    pages_in_use,
    replace_single_tokens,
    token_batch,
)


class _PlanSections:
    """The sections of an input buffer that hold a TilePlan. Row i of a page table of rows of `max_pages` ids is that of
    sequence i.
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
        for name, fields, entries in zip(self.sizes, (PIECE_FIELDS, SPLIT_FIELDS), found, strict=True):
            table = host[name].reshape(fields, -1)
            table[:, : entries.shape[1]] = entries
            table[:, entries.shape[1] :] = 0

    def plan(self, parts: Mapping[str, torch.Tensor], tokens: int, tiles: int) -> TilePlan:
        """For `tokens` tokens in at most `tiles` tiles."""
        return TilePlan(
            tokens=tokens,
            page_size=self._page_size,
            tile_tokens=self.tile_tokens,
            pages=parts["page_table"],
            pieces=parts["pieces"].view(PIECE_FIELDS, -1)[:, : most_pieces(tiles, self._at_once)],
            splits=parts["splits"].view(SPLIT_FIELDS, -1)[:, : most_splits(tiles, self._at_once)],
            num_partials=most_partials(tiles, self._at_once),
        )


class MlaStep:
    """Decode steps over one cache; see capture.GraphedStep."""

    kinds = 1

    def __init__(self, decoder: MlaDecoder, cache: KvCache, *, max_batch: int, max_pages: int) -> None:
        self._decoder = decoder
        self._cache = cache
        self._max_pages = max_pages
        self._plan = _PlanSections(decoder, cache, max_batch, max_pages, decode_only=True)
        self._inputs = InputBuffer(
            {
                "live_rows": 1,
                **dict.fromkeys(TOKEN_SECTIONS, max_batch),
                **self._plan.sizes,
                "page_table": max_batch * max_pages,
            },
            cache.device,
        )
        self._table = PageTable(self._inputs.host["page_table"], max_batch, max_pages)

    def size(self, slices: Sequence[SequenceSlice]) -> int | None:
        return decode_size(slices, self._max_pages * self._cache.page_size)

    def replace_tokens(self, slices: Sequence[SequenceSlice], token_ids: torch.Tensor) -> None:
        self._inputs.device["token_ids"][: len(slices)].copy_(token_ids)

    def hidden(self, size: int, _kind: int = 0, received: torch.Tensor | None = None, /) -> torch.Tensor:
        parts = self._inputs.device
        batch, plan = token_batch(parts, size), self._plan.plan(parts, size, size)
        return self._decoder.hidden(batch, self._cache, hidden=received, live_rows=parts["live_rows"], plan=plan)

    def fill(self, slices: Sequence[SequenceSlice], size: int) -> int:
        """Padded rows see no tokens."""
        host, page_size, live = self._inputs.host, self._cache.page_size, len(slices)
        used = pages_in_use(slices, page_size)
        kv_lens = np.zeros(size, dtype=np.int32)
        kv_lens[:live] = [piece.end for piece in slices]
        self._inputs.wait()
        host["live_rows"][0] = live
        fill_tokens(host, slices, size, page_size)
        self._plan.fill(host, np.ones(size, dtype=np.int32), kv_lens)
        self._inputs.upload(self._table.fill(slices, used))
        return 0


class MlaChunkStep:
    """Steps of chunks over one cache; see capture.GraphedStep. With `last_only`, in the last stage, the last layer
    returns only the last row of each slice.
    """

    kinds = 1

    def __init__(
        self,
        decoder: MlaDecoder,
        cache: KvCache,
        *,
        max_tokens: int,
        max_slices: int,
        max_pages: int,
        last_only: bool,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._max_slices = max_slices
        self._max_pages = max_pages
        self._last_only = last_only
        self._plan = _PlanSections(decoder, cache, max_tokens, max_pages, decode_only=False)
        self._inputs = InputBuffer(
            {
                "live_rows": 1,
                **dict.fromkeys(TOKEN_SECTIONS, max_tokens),
                **dict.fromkeys(SLICE_SECTIONS, max_slices),
                **self._plan.sizes,
                "page_table": max_slices * max_pages,
            },
            cache.device,
        )
        self._table = self._inputs.host["page_table"].reshape(max_slices, max_pages)

    def size(self, slices: Sequence[SequenceSlice]) -> int | None:
        max_context = self._max_pages * self._cache.page_size
        return chunks_size(slices, max_slices=self._max_slices, max_context=max_context)

    def fill(self, slices: Sequence[SequenceSlice], size: int) -> int:
        """Padded rows see no tokens."""
        host, lengths = self._inputs.host, [len(piece.token_ids) for piece in slices]
        used = pages_in_use(slices, self._cache.page_size)
        self._inputs.wait()
        fill_chunks(host, slices, size, self._cache.page_size)
        self._plan.fill(
            host,
            np.array([*lengths, size - sum(lengths)], dtype=np.int32),
            np.array([*(piece.end for piece in slices), 0], dtype=np.int32),
        )
        for row, (piece, count) in enumerate(zip(slices, used, strict=True)):
            self._table[row, :count] = piece.pages[:count]
        self._inputs.upload(len(slices) * self._max_pages)
        return 0

    def replace_tokens(self, slices: Sequence[SequenceSlice], token_ids: torch.Tensor) -> None:
        replace_single_tokens(self._inputs.device, slices, token_ids)

    def hidden(self, size: int, _kind: int = 0, received: torch.Tensor | None = None, /) -> torch.Tensor:
        parts, slices = self._inputs.device, min(size, self._max_slices)
        # the last tile of each slice may be short, and so may that of the padding
        tiles = min(ceil_div(size, self._plan.tile_tokens) + slices + 1, size)
        return self._decoder.hidden(
            token_batch(parts, size, last_rows=parts["last_rows"][:slices]),
            self._cache,
            hidden=received,
            live_rows=parts["live_rows"],
            last_only=self._last_only,
            plan=self._plan.plan(parts, size, tiles),
        )
