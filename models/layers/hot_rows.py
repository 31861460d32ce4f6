"""Latent rows of a step over a HiSparse cache: hot rows on the GPU, the others fetched from host memory.

    place      the step's new rows are written directly into the hot buffer
    select     in the first layer of an index group: plan what is fetched, evicted and reused, and start to fetch the
               rows of all layers of the group
    selected   wait for the rows of a layer
    finish     the new rows are in host memory

Fetches run on a side stream, concurrently with the step: with the queries of the layer, or with whole layers.
Write-back runs there too, and starts when the last layer has placed its rows. At its end, the step waits for the side
stream. So after a step the rows of all its tokens are in host memory: the next step may evict or fetch them, and freed
pages may get another owner. Nothing that is enqueued depends on values that only the host knows, and all memory stays
at fixed addresses, so that a CUDA graph can capture a step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ...kernels.dsa.index_plan import IndexPlan
from ...kernels.hisparse.slot_tables import HotRows, KvRows
from ...kernels.hisparse.swap_in import copy_misses, swap_in
from ...kernels.hisparse.swap_plan import SwapPlan
from ...kernels.hisparse.write_back import write_back
from ...memory.hisparse.cache import HiSparseCache
from .batch import SequenceSlice
from .latent_rows import RowPlaces, latent_pages
from .unpacked_pages import PackedFormat, UnpackedPages


class HotLatentRows:
    """LatentRows of one step. If all sequences are fully resident, each may have any number of tokens, as in chunks of
    prompts. Otherwise each has one token, because an evicting sequence has one slot for its new token.
    """

    def __init__(
        self,
        cache: HiSparseCache,
        plan: IndexPlan,
        new_rows: KvRows,
        hot_slots: torch.Tensor,
        *,
        all_resident: bool = False,
        packed: PackedFormat | None = None,
    ) -> None:
        """`new_rows` [T] are the host rows of the new tokens, `hot_slots` [T] int32 the slots of their requests.

        Padding sees no tokens in `plan`; its row is -1, and its slot is any valid one. If all sequences are fully
        resident, nothing is fetched, and their hot pages serve as the page table. `packed` is the format of packed
        rows, or None.
        """
        if not all_resident and len(plan.page_table) != plan.tokens:
            raise ValueError(
                f"a step of {plan.tokens} tokens of {len(plan.page_table)} sequences: one each is needed, because a "
                "sequence is not fully resident"
            )
        self._cache = cache
        self._plan = plan
        self._host_rows = new_rows
        self._requests = hot_slots
        self._swaps: SwapPlan | None = None
        self.rows_of: IndexPlan | None = None
        self._unpacked: UnpackedPages | None = None
        if all_resident and packed is not None and packed.shares_pages(plan):
            slots = plan.largest(hot_slots * (plan.visible > 0))  # [B]; padding has any slot
            self._unpacked = UnpackedPages(plan, cache.tables.hot_pages[slots], packed)
            self.rows_of = self._unpacked.plan
        elif all_resident:
            self.rows_of = IndexPlan(cache.page_size, cache.tables.hot_pages, hot_slots, plan.visible)
        else:
            self._swaps = cache.swaps(plan.tokens)
        self._selection: HotRows | None = None
        self._hot_rows = cache.tables.newest_rows(hot_slots, plan.visible)  # [groups, T]
        self._fetched: dict[int, torch.cuda.Event] = {}
        self._being_read: torch.Tensor | None = None
        """Tensors that the side stream uses. They are kept, because the allocator would reuse freed memory at once."""
        self._last_layer = len(cache.groups) - 1

    def place(self, layer: int) -> RowPlaces:
        return RowPlaces(latent_pages(self._cache.hot, layer), self._hot_rows[self._cache.groups[layer]])

    def select(self, layer: int, tokens: torch.Tensor, /) -> None:
        if self.rows_of is not None:
            self._selection = HotRows(tokens)
            return
        cache, swaps = self._cache, self._swaps
        assert swaps is not None, "a step that fetches rows has a swap plan"
        self._selection = swaps.rows
        self._being_read = tokens
        with self._on_side_stream():
            swap_in(
                swaps,
                tokens,
                self._requests,
                self._plan.visible,
                cache.group_tables[cache.groups[layer]],
                self._plan.page_table,
                cache.host_bytes[:, layer],
                cache.hot_bytes[:, layer],
            )
            self._record_fetched(layer)
            # the plan must not change before all layers of the group have their rows
            for follower, group in enumerate(cache.groups):
                if follower > layer and group == cache.groups[layer]:
                    copy_misses(swaps, cache.host_bytes[:, follower], cache.hot_bytes[:, follower])
                    self._record_fetched(follower)

    def selected(self, layer: int) -> RowPlaces:
        if layer in self._fetched:
            torch.cuda.current_stream(self._cache.device).wait_event(self._fetched[layer])
        if layer == self._last_layer:
            with self._on_side_stream():
                self._write_back()
        assert self._selection is not None, "the first layer of every index group selects"
        pages = latent_pages(self._cache.hot, layer)
        return RowPlaces(self._unpacked.of_layer(pages) if self._unpacked else pages, self._selection)

    def finish(self) -> None:
        if self._cache.side_stream is not None:
            torch.cuda.current_stream(self._cache.device).wait_stream(self._cache.side_stream)

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Enqueue on the side stream: after all work of the step so far, concurrent with its later work."""
        side = self._cache.side_stream
        if side is None:
            yield
            return
        side.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(side):
            yield

    def _record_fetched(self, layer: int) -> None:
        """Record that the rows of this layer are complete when the side stream's work so far is."""
        if self._cache.side_stream is not None:
            self._fetched[layer] = self._cache.side_stream.record_event()

    def _write_back(self) -> None:
        """Start the write-back. New rows are not evicted in their own step, so no access conflicts with it."""
        cache = self._cache
        hot_rows = HotRows(self._hot_rows[cache.layer_groups])
        write_back(cache.hot_bytes, hot_rows, cache.host_bytes, self._host_rows)
        cache.rows_written += (self._host_rows >= 0).sum() * len(cache.groups)


def all_resident(cache: HiSparseCache, slices: Sequence[SequenceSlice]) -> bool:
    """Whether a step of these sequences, enqueued now, is fully resident. False without sequences."""
    return bool(slices) and all(
        piece.hot_slot is not None and cache.is_resident(piece.hot_slot, piece.end) for piece in slices
    )
