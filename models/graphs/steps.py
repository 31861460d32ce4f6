"""Base classes of the steps of all architectures (capture.GraphedStep): their inputs, and which batches fit."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ...memory.kv_pool import KvCache
from ..layers.batch import SequenceSlice
from .inputs import SLICE_SECTIONS, TOKEN_SECTIONS, InputBuffer, fill_chunks, fill_tokens


class SingleTokens:
    """A step of one token per sequence."""

    _kinds = 1

    def __init__(self, cache: KvCache, sections: Mapping[str, int], *, max_batch: int, max_pages: int) -> None:
        """`sections` are those that depend on the architecture. The last section, `pages`, holds page ids."""
        self._cache = cache
        self._max_pages = max_pages
        tokens = dict.fromkeys(TOKEN_SECTIONS, max_batch)
        sizes = {"live_rows": 1, **tokens, **sections, "pages": max_batch * max_pages}
        self._inputs = InputBuffer(sizes, cache.device)

    def num_kinds(self, _size: int, /) -> int:
        return self._kinds

    def size(self, slices: Sequence[SequenceSlice]) -> int | None:
        max_context = self._max_pages * self._cache.page_size
        fits = all(len(piece.token_ids) == 1 and piece.end <= max_context for piece in slices)
        return len(slices) if fits else None

    def replace_tokens(self, slices: Sequence[SequenceSlice], token_ids: torch.Tensor) -> None:
        self._inputs.device["token_ids"][: len(slices)].copy_(token_ids)

    def _fill_tokens(self, slices: Sequence[SequenceSlice], size: int) -> None:
        """Wait until the inputs of the previous step are uploaded, then fill the sections that do not depend on the
        architecture, except `pages`.
        """
        self._inputs.wait()
        self._inputs.host["live_rows"][0] = len(slices)
        fill_tokens(self._inputs.host, slices, size, self._cache.page_size)


class ChunkLimits(NamedTuple):
    """The largest step of chunks: its tokens, its slices, and the pages of one sequence. With `last_only`, in the last
    stage, the last layer returns only the last row of each slice.
    """

    max_tokens: int
    max_slices: int
    max_pages: int
    last_only: bool


class Chunks:
    """A step of chunks of prompts."""

    _kinds = 1

    def __init__(self, cache: KvCache, sections: Mapping[str, int], limits: ChunkLimits) -> None:
        """`sections` as above."""
        self._cache = cache
        max_tokens, self._max_slices, self._max_pages, self._last_only = limits
        tokens, of_slices = dict.fromkeys(TOKEN_SECTIONS, max_tokens), dict.fromkeys(SLICE_SECTIONS, self._max_slices)
        sizes = {"live_rows": 1, **tokens, **of_slices, **sections, "pages": self._max_slices * self._max_pages}
        self._inputs = InputBuffer(sizes, cache.device)

    def num_kinds(self, _size: int, /) -> int:
        return self._kinds

    def size(self, slices: Sequence[SequenceSlice]) -> int | None:
        max_context = self._max_pages * self._cache.page_size
        if len(slices) > self._max_slices or any(piece.end > max_context for piece in slices):
            return None
        return sum(len(piece.token_ids) for piece in slices)

    def replace_tokens(self, slices: Sequence[SequenceSlice], token_ids: torch.Tensor) -> None:
        parts, live = self._inputs.device, len(slices)
        rows = parts["row_starts"][:live].long()
        own = parts["token_ids"][rows]
        parts["token_ids"][rows] = torch.where(parts["query_lens"][:live] == 1, token_ids.to(own.dtype), own)

    def _fill_chunks(self, slices: Sequence[SequenceSlice], size: int) -> None:
        """As `_fill_tokens` above."""
        self._inputs.wait()
        fill_chunks(self._inputs.host, slices, size, self._cache.page_size)

    def _upload_table(self, slices: Sequence[SequenceSlice], used: Sequence[int]) -> None:
        """Fill `pages` with a row for each slice, and upload all sections."""
        table = self._inputs.host["pages"].reshape(self._max_slices, self._max_pages)
        for row, (piece, count) in enumerate(zip(slices, used, strict=True)):
            table[row, :count] = piece.pages[:count]
        self._inputs.upload(len(slices) * self._max_pages)

    def _last_rows(self, size: int) -> torch.Tensor:
        """The last row of each slice of a step of `size` tokens."""
        return self._inputs.device["last_rows"][: min(size, self._max_slices)]
