"""The prefill step of a sparse-attention decoder for CUDA graphs. Every token has its own selection, so chunks and
single tokens are computed in the same way: only the tokens that each token sees change from step to step.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ...kernels.dsa.index_plan import IndexPlan
from ...memory.hisparse.cache import HiSparseCache
from ...memory.kv_pool import KvCache
from ...memory.pages import pages_for
from ..decoders.dsa import DsaDecoder
from ..layers.batch import SequenceSlice
from ..layers.hot_rows import all_resident
from .inputs import pages_in_use, token_batch
from .steps import ChunkLimits, Chunks

LARGEST_STEP = 1024
"""Maximum tokens of a step. In larger steps, the GPU takes longer than the host takes to launch without a graph."""
LONGEST_CONTEXT = 32768
"""Index scores have room for this many tokens. With longer contexts a step takes so long that a graph saves little."""
_SIGHT_SECTIONS = ("sequence", "visible", "hot_slots")
"""Sections with one element per token: what it sees."""


class DsaChunkStep(Chunks):
    """Steps of chunks of a sparse-attention decoder over one cache; see capture.GraphedStep. Over a HiSparse cache, all
    sequences are fully resident. If latent rows are packed, there are two kinds of steps: kind 1 unpacks whole pages
    (layers/unpacked_pages.py), and kind 0 is for sequences that have too many pages for that.
    """

    def __init__(self, decoder: DsaDecoder, cache: KvCache, limits: ChunkLimits) -> None:
        max_pages = min(limits.max_pages, pages_for(LONGEST_CONTEXT, cache.page_size))
        sections = dict.fromkeys(_SIGHT_SECTIONS, limits.max_tokens)
        super().__init__(cache, sections, limits._replace(max_pages=max_pages))
        self._decoder = decoder
        self._kinds = 1 if decoder.packed is None else 2

    def size(self, slices: Sequence[SequenceSlice]) -> int | None:
        if isinstance(self._cache, HiSparseCache) and not all_resident(self._cache, slices):
            return None
        return super().size(slices)

    def fill(self, slices: Sequence[SequenceSlice], size: int) -> int:
        """Padded rows see no tokens."""
        host, lengths = self._inputs.host, [len(piece.token_ids) for piece in slices]
        used, total = pages_in_use(slices, self._cache.page_size), sum(lengths)
        self._fill_chunks(slices, size)
        for name in _SIGHT_SECTIONS:
            host[name][total:size] = 0
        host["sequence"][:total] = np.repeat(np.arange(len(slices)), lengths)
        host["visible"][:total] = host["positions"][:total] + 1
        host["hot_slots"][:total] = np.repeat([piece.hot_slot or 0 for piece in slices], lengths)
        self._upload_table(slices, used)
        return int(sum(used) <= self._most_shared_pages(size))

    def _most_shared_pages(self, size: int) -> int:
        """The most pages of all sequences in a step of kind 1; -1 if there is no such kind."""
        if self._decoder.packed is None:
            return -1
        return self._decoder.packed.most_shared_rows(size) // self._cache.page_size

    def hidden(self, size: int, kind: int = 0, received: torch.Tensor | None = None, /) -> torch.Tensor:
        parts = self._inputs.device
        table = parts["pages"].view(-1, self._max_pages)
        num_pages = self._most_shared_pages(size) if kind == 1 else None
        plan = IndexPlan(self._cache.page_size, table, parts["sequence"][:size], parts["visible"][:size], num_pages)
        batch = token_batch(
            parts,
            size,
            last_rows=self._last_rows(size),
            hot_slots=parts["hot_slots"][:size],
            all_resident=True,
        )
        return self._decoder.hidden(
            batch,
            self._cache,
            hidden=received,
            live_rows=parts["live_rows"],
            last_only=self._last_only,
            plan=plan,
        )
