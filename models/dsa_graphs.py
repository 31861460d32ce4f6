"""The decode step of a sparse-attention decoder as a CUDA graph has it: the page table changes from step to step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ..kernels.index_topk import IndexPlan
from ..memory.kv_pool import KvCache
from .batch import ForwardBatch, SequenceSlice
from .dsa_decoder import DsaDecoder
from .graph_inputs import TOKEN_SECTIONS, DecodeRows, InputBuffer
from .latent_rows import MakeLatentRows, new_token_rows


class DsaStep:
    """Steps of a sparse-attention decoder over one cache; see graphs.GraphedStep.

    `make_rows` says where latent rows are, other than in the pages of the cache. It is called at capture, once per
    batch size; what its rows read and the host changes, its owner brings to the device before each step.
    """

    def __init__(
        self,
        decoder: DsaDecoder,
        cache: KvCache,
        *,
        max_batch: int,
        max_pages: int,
        make_rows: MakeLatentRows | None = None,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._make_rows = make_rows
        self._max_pages = max_pages
        self._inputs = InputBuffer(
            {
                "live_rows": 1,
                **dict.fromkeys(TOKEN_SECTIONS, max_batch),
                "visible": max_batch,
                "hot_slots": max_batch,
                "page_table": max_batch * max_pages,
            },
            cache.device,
        )
        self._table = self._inputs.host["page_table"].reshape(max_batch, max_pages)
        one = ForwardBatch.build(
            [SequenceSlice([0], 0, [0])], page_size=cache.page_size, num_kv_heads=1, device=cache.device
        )
        self._template = replace(one, slices=())  # with a plan for dense attention, which nothing here reads
        self._rows = torch.arange(max_batch, dtype=torch.int32, device=cache.device)

    def token_ids(self, size: int) -> torch.Tensor:
        return self._inputs.device["token_ids"][:size]

    def hidden(self, size: int) -> torch.Tensor:
        parts, page_size = self._inputs.device, self._cache.page_size
        live_rows = parts["live_rows"]
        table = parts["page_table"].view(-1, self._max_pages)
        plan = IndexPlan(page_size, table[:size], self._rows[:size], parts["visible"][:size])
        batch = replace(
            self._template,
            token_ids=parts["token_ids"][:size],
            positions=parts["positions"][:size],
            page_ids=parts["page_ids"][:size],
            offsets=parts["offsets"][:size],
            hot_slots=parts["hot_slots"][:size],
        )
        rows = None
        if self._make_rows is not None:
            rows = self._make_rows(plan, new_token_rows(batch, page_size, live_rows))
        return self._decoder.hidden(batch, self._cache, live_rows=live_rows, plan=plan, rows=rows)

    def fill(self, slices: Sequence[SequenceSlice], size: int) -> None:
        """Padded rows see nothing. Of the page table, the rows in use are copied whole."""
        host, page_size, live = self._inputs.host, self._cache.page_size, len(slices)
        rows = DecodeRows.gather(slices, page_size)
        self._inputs.wait()
        host["live_rows"][0] = live
        rows.fill_tokens(host, size, page_size)
        host["visible"][:live] = rows.starts + 1
        host["visible"][live:size] = 0
        host["hot_slots"][:live] = [piece.hot_slot or 0 for piece in slices]
        host["hot_slots"][live:size] = 0
        for row, pages in zip(self._table, np.split(rows.pages, rows.ends[:-1]), strict=False):
            row[: len(pages)] = pages
        self._inputs.upload(live * self._max_pages)
