"""The prefill step of a dense decoder for CUDA graphs: its slices and their attention plan change from step to step."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from ...common.arithmetic import ceil_div, round_up
from ...kernels.attention.attention_plan import (
    COPY_TOKENS,
    TILE_QUERIES,
    IntArray,
    Tiles,
    WorkPlan,
    cut_copies,
    cut_decode,
    cut_tiles,
    num_parts,
    num_pieces,
)
from ...memory.kv_pool import KvCache
from ..decoders.dense import Decoder
from ..layers.batch import ForwardBatch, SequenceSlice
from .inputs import fill_table, pages_in_use, token_batch
from .steps import ChunkLimits, Chunks

COPIED_TOKENS = 32768
"""Room for keys and values that attention copies out of their pages, in tokens. With longer contexts a step takes so
long that a graph saves little.
"""
_KEY_SECTIONS = ("kv_lens", "page_starts", "copy_starts")
"""Sections with one element per slice, beside those of inputs.py."""
_TILE_SECTIONS = ("tiles", "splits", "tile_counts")
_LAST_SECTIONS = ("last_tiles", "last_splits", "last_counts")
_WINDOWED = "windowed_"
"""Prefix of the sections of windowed layers."""
_NO_TILE = 1 << 30
"""First query of an unused tile: beyond every sequence."""


class ChunkStep(Chunks):
    """Steps of chunks of a dense decoder over one cache; see capture.GraphedStep.

    With `decode_rows`, the decode kernel computes slices of a single token; otherwise the prefill kernel does.
    """

    def __init__(self, decoder: Decoder, cache: KvCache, limits: ChunkLimits, *, decode_rows: bool) -> None:
        self._decoder = decoder
        max_tokens, max_slices, *_ = limits
        (self._pool,) = cache.pools
        self._decode_rows = decode_rows
        device, heads, config = cache.device, self._pool.num_heads, decoder.config
        self._parts = num_parts(heads * config.num_heads // config.num_kv_heads, device)
        self._plans: list[tuple[str, int | None]] = [("", None)]
        """The attention plans of a step: the prefix of their sections, and their window."""
        if config.window is not None:
            self._plans.append((_WINDOWED, config.window))
        plan_sections = {
            "piece_starts": max_slices + 1,
            "pieces": 4 * num_pieces(max_slices, heads, device) if decode_rows else 0,
            "tiles": 5 * (_num_tiles(max_tokens, max_slices) + self._parts),
            "splits": 4 * self._parts,
            "tile_counts": 2,
            "last_tiles": 5 * (max_slices + self._parts),
            "last_splits": 4 * self._parts,
            "last_counts": 2,
            "copies": 2 * COPIED_TOKENS // COPY_TOKENS,
            "num_copies": 1,
        }
        sections = {
            **dict.fromkeys(_KEY_SECTIONS, max_slices),
            **{prefix + name: size for prefix, _ in self._plans for name, size in plan_sections.items()},
        }
        super().__init__(cache, sections, limits)
        self._copied = torch.empty(
            2, heads * COPIED_TOKENS, self._pool.head_dim, dtype=decoder.parameters.dtype, device=device
        )

    def size(self, slices: Sequence[SequenceSlice]) -> int | None:
        copied = sum(round_up(piece.end, COPY_TOKENS) for piece in slices if self._tiled(piece))
        if copied > COPIED_TOKENS:
            return None
        return super().size(slices)

    def fill(self, slices: Sequence[SequenceSlice], size: int) -> int:
        host, live, used = self._inputs.host, len(slices), pages_in_use(slices, self._pool.page_size)
        kv_lens = np.array([piece.end for piece in slices], dtype=np.int32)
        tiled = np.array([len(piece.token_ids) * self._tiled(piece) for piece in slices], dtype=np.int32)
        _, copy_starts = cut_copies(tiled, kv_lens)

        self._fill_chunks(slices, size)
        for name in _KEY_SECTIONS:
            host[name][live:] = 0
        host["kv_lens"][:live] = kv_lens
        host["page_starts"][:live] = list(accumulate(used, initial=0))[:-1]
        host["copy_starts"][:live] = copy_starts
        for prefix, window in self._plans:
            self._fill_plan(prefix, window, tiled, kv_lens, size)
        pages = [np.fromiter(piece.pages[:count], np.int32, count) for piece, count in zip(slices, used, strict=True)]
        num_pages = sum(used)
        if pages:
            host["pages"][:num_pages] = np.concatenate(pages)
        self._inputs.upload(num_pages)
        return 0

    def hidden(self, size: int, _kind: int = 0, received: torch.Tensor | None = None, /) -> torch.Tensor:
        return self._decoder.hidden(
            self._batch(size),
            self._cache,
            hidden=received,
            live_rows=self._inputs.device["live_rows"],
            last_only=self._last_only,
        )

    def _tiled(self, piece: SequenceSlice) -> bool:
        """Whether the prefill kernel computes this slice."""
        return not self._decode_rows or len(piece.token_ids) > 1

    def _slices(self, size: int) -> int:
        """The most slices of a step of `size` tokens."""
        return min(size, self._max_slices)

    def _fill_plan(self, prefix: str, window: int | None, tiled: IntArray, kv_lens: IntArray, size: int) -> None:
        host = self._inputs.host
        for names, last_only in ((_TILE_SECTIONS, False), (_LAST_SECTIONS, True)):
            found = cut_tiles(tiled, kv_lens, self._parts, last_only=last_only, window=window)
            for name, rows_of_table, entries in zip(names, (5, 4), found, strict=False):
                table = host[prefix + name].reshape(rows_of_table, -1)
                table[:, : entries.shape[1]] = entries
                table[:2, entries.shape[1] :] = [[0], [_NO_TILE]]
            host[prefix + names[2]][:] = [entries.shape[1] for entries in found]
        copies, _ = cut_copies(tiled, kv_lens, window)
        host[prefix + "copies"].reshape(2, -1)[:, : copies.shape[1]] = copies
        host[prefix + "num_copies"][0] = copies.shape[1]
        if self._decode_rows:
            self._fill_pieces(prefix, window, np.where(tiled, 0, kv_lens).astype(np.int32), size)

    def _fill_pieces(self, prefix: str, window: int | None, kv_lens: IntArray, size: int) -> None:
        host, slices = self._inputs.host, self._slices(size)
        padded = np.zeros(slices, dtype=np.int32)
        padded[: len(kv_lens)] = kv_lens
        most = num_pieces(slices, self._pool.num_heads, self._cache.device)
        pieces, piece_starts = cut_decode(padded, most, window)
        host[prefix + "piece_starts"][: slices + 1] = piece_starts
        fill_table(host[prefix + "pieces"], pieces)

    def _tiles(self, prefix: str, names: tuple[str, str, str], most: int) -> Tiles:
        tiles, splits, counts = (self._inputs.device[prefix + name] for name in names)
        return Tiles(tiles.view(5, -1)[:, : most + self._parts], splits.view(4, -1), counts)

    def _plan(self, size: int, prefix: str, window: int | None) -> WorkPlan:
        parts, slices = self._inputs.device, self._slices(size)
        pieces = parts[prefix + "pieces"].view(4, -1)
        if self._decode_rows:
            pieces = pieces[:, : num_pieces(slices, self._pool.num_heads, self._cache.device)]
        return WorkPlan(
            tokens=size,
            page_size=self._pool.page_size,
            num_kv_heads=self._pool.num_heads,
            pages=parts["pages"],
            page_starts=parts["page_starts"][:slices],
            kv_lens=parts["kv_lens"][:slices],
            query_lens=parts["query_lens"][:slices],
            row_starts=parts["row_starts"][:slices],
            pieces=pieces,
            piece_starts=parts[prefix + "piece_starts"][: slices + 1],
            tiles=self._tiles(prefix, _TILE_SECTIONS, _num_tiles(size, slices)),
            last_tiles=self._tiles(prefix, _LAST_SECTIONS, slices),
            copied_tokens=COPIED_TOKENS,
            copies=parts[prefix + "copies"].view(2, -1),
            copy_starts=parts["copy_starts"][:slices],
            most_parts=self._parts,
            num_copies=parts[prefix + "num_copies"],
            copied=self._copied,
            window=window,
        )

    def _batch(self, size: int) -> ForwardBatch:
        parts = self._inputs.device
        attention, *windowed = (self._plan(size, *plan) for plan in self._plans)
        return token_batch(
            parts,
            size,
            last_rows=self._last_rows(size),
            attention=attention,
            windowed=windowed[0] if windowed else None,
        )


def _num_tiles(tokens: int, slices: int) -> int:
    """The most tiles of `tokens` queries of `slices` sequences."""
    return ceil_div(tokens, TILE_QUERIES) + slices
