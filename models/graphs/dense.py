"""The decode step of a dense decoder for CUDA graphs: the attention plan changes from step to step."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from ...kernels.attention.attention_plan import Tiles, WorkPlan, cut_decode, has_few_keys, num_pieces
from ...kernels.attention.rope_decode_cuda import most_sequences
from ...memory.kv_pool import KvCache
from ..decoders.dense import Decoder
from ..layers.batch import ForwardBatch, SequenceSlice
from .inputs import KnownPages, fill_table, pages_in_use, token_batch
from .steps import SingleTokens


class DenseStep(SingleTokens):
    """Steps of a dense decoder over one cache; see capture.GraphedStep. With few sequences there is a second kind of
    step, for sequences that all have few keys (rope_attention.py).
    """

    def __init__(self, decoder: Decoder, cache: KvCache, *, max_batch: int, max_pages: int) -> None:
        self._decoder = decoder
        (self._pool,) = cache.pools
        window = decoder.config.window
        self._plans: list[tuple[str, int | None]] = [("", None), *([] if window is None else [("windowed_", window)])]
        """The attention plans of a step: the prefix of their sections, and their window."""
        device = cache.device
        pieces = num_pieces(max_batch, self._pool.num_heads, device)
        sections = {
            "kv_lens": max_batch,
            "page_starts": max_batch,
            **{f"{prefix}piece_starts": max_batch + 1 for prefix, _ in self._plans},
            **{f"{prefix}pieces": 4 * pieces for prefix, _ in self._plans},
        }
        super().__init__(cache, sections, max_batch=max_batch, max_pages=max_pages)
        self._known = [KnownPages() for _ in range(max_batch)]
        """The pages of each row of the last step."""
        self._ones = torch.ones(max_batch, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_batch, dtype=torch.int32, device=device)
        self._none = torch.empty(2, 0, dtype=torch.int32, device=device)
        self._no_tiles = Tiles(self._none, self._none, self._none)
        parameters, (key_pages, _) = decoder.parameters, self._pool.layer(0)
        group = len(parameters.heads) // len(parameters.kv_heads)
        self._window = decoder.config.page_window  # of all layers
        self._few_sequences = most_sequences(group, key_pages, parameters.dtype)

    def num_kinds(self, size: int, /) -> int:
        return 2 if size <= self._few_sequences else 1

    def hidden(self, size: int, kind: int = 0, received: torch.Tensor | None = None, /) -> torch.Tensor:
        batch, live_rows = self._batch(size, few_keys=kind == 1), self._inputs.device["live_rows"]
        return self._decoder.hidden(batch, self._cache, hidden=received, live_rows=live_rows)

    def fill(self, slices: Sequence[SequenceSlice], size: int) -> int:
        """Padded rows have no keys, so they have no pieces."""
        host, live, used = self._inputs.host, len(slices), pages_in_use(slices, self._pool.page_size)
        for known, piece, count in zip(self._known, slices, used, strict=False):
            known.update(piece.pages, count)
        pages = np.concatenate([KnownPages.NONE, *(known.array for known in self._known[:live])])
        kv_lens = np.zeros(size, dtype=np.int32)
        kv_lens[:live] = [piece.end for piece in slices]
        plans = [cut_decode(kv_lens, self._num_pieces(size), window) for _, window in self._plans]

        self._fill_tokens(slices, size)
        host["kv_lens"][:size] = kv_lens
        host["page_starts"][:live] = list(accumulate(used, initial=0))[:live]
        host["page_starts"][live:size] = 0
        for (prefix, _), (pieces, piece_starts) in zip(self._plans, plans, strict=True):
            host[f"{prefix}piece_starts"][: size + 1] = piece_starts
            fill_table(host[f"{prefix}pieces"], pieces)
        host["pages"][: len(pages)] = pages
        self._inputs.upload(len(pages))
        return int(self.num_kinds(size) == 2 and has_few_keys(int(kv_lens.max(initial=0)), self._window))

    def _num_pieces(self, size: int) -> int:
        return num_pieces(size, self._pool.num_heads, self._cache.device)

    def _plan(self, size: int, prefix: str, window: int | None, *, few_keys: bool) -> WorkPlan:
        parts = self._inputs.device
        return WorkPlan(
            tokens=size,
            page_size=self._pool.page_size,
            num_kv_heads=self._pool.num_heads,
            pages=parts["pages"],
            page_starts=parts["page_starts"][:size],
            kv_lens=parts["kv_lens"][:size],
            query_lens=self._ones[:size],
            row_starts=self._rows[:size],
            pieces=parts[f"{prefix}pieces"].view(4, -1)[:, : self._num_pieces(size)],
            piece_starts=parts[f"{prefix}piece_starts"][: size + 1],
            tiles=self._no_tiles,
            last_tiles=self._no_tiles,
            copied_tokens=0,
            copies=self._none,
            copy_starts=self._rows[:size],
            most_parts=0,
            num_copies=self._none,
            window=window,
            few_keys=few_keys,
        )

    def _batch(self, size: int, *, few_keys: bool) -> ForwardBatch:
        """The first `size` rows as a batch of single tokens."""
        parts = self._inputs.device
        attention, *windowed = (self._plan(size, *plan, few_keys=few_keys) for plan in self._plans)
        return token_batch(parts, size, attention=attention, windowed=windowed[0] if windowed else None)
