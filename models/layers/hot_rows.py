"""Latent rows of a decode step over a HiSparse cache: hot rows on the GPU, the others fetched from host memory.

    place      the step's new rows go straight into the hot buffer
    select     the first layer of an index group decides what is fetched, evicted and reused. Its rows, and those of the
               group's other layers, are on their way from then on
    selected   a layer waits for its rows
    finish     the new rows are in host memory

Rows come in on a side stream, beside what the step computes meanwhile: the queries of the layer, or whole layers.
Write-back is there too, and starts when the last layer has placed its rows. All of it has joined the stream of the step
by its end, so whatever comes after a step finds the rows of all its tokens in host memory: the next step, which may
evict them or fetch them again, as well as whoever frees the pages. Nothing is enqueued that depends on values only the
host knows, and all memory stays in place, so that a CUDA graph captures a step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ...kernels.hisparse.slot_tables import HotRows, KvRows
from ...kernels.hisparse.swap_in import copy_misses, swap_in
from ...kernels.hisparse.write_back import write_back
from ...kernels.mla.index_plan import IndexPlan
from ...kernels.mla.index_topk import position_rows
from ...memory.hisparse.cache import HiSparseCache
from .batch import SequenceSlice
from .latent_rows import RowPlaces


class HotLatentRows:
    """LatentRows of one step, of one token per sequence."""

    def __init__(
        self,
        cache: HiSparseCache,
        plan: IndexPlan,
        new_rows: KvRows,
        hot_slots: torch.Tensor,
        *,
        all_resident: bool = False,
    ) -> None:
        """`new_rows` [T] are those of the new tokens in host memory, `hot_slots` [T] int32 the slots of their requests.

        Padding sees nothing in `plan`, its row is -1 and its slot any valid one. When all sequences are resident there
        is nothing to fetch, and their hot pages are a page table like any other.
        """
        if len(plan.page_table) != plan.tokens:
            raise ValueError(f"a step of {plan.tokens} tokens of {len(plan.page_table)} sequences: one each is needed")
        self._cache = cache
        self._plan = plan
        self._host_rows = new_rows
        self._requests = hot_slots
        self._swaps = cache.swaps(plan.tokens)
        self._residents: IndexPlan | None = None
        if all_resident:
            self._residents = IndexPlan(cache.page_size, cache.tables.hot_pages, hot_slots, plan.visible)
        self._selection = self._swaps.rows
        self._hot_rows = cache.tables.newest_rows(hot_slots, plan.visible)  # [groups, T]
        self.fetches = not all_resident and cache.side_stream is not None
        self._fetched: dict[int, torch.cuda.Event] = {}
        self._being_read: torch.Tensor | None = None
        """By the side stream. Memory that is given back is at once the next tensor's on the stream of the step."""
        self._last_layer = len(cache.groups) - 1

    def place(self, layer: int) -> RowPlaces:
        return RowPlaces(self._pages(layer), self._hot_rows[self._cache.groups[layer]])

    def select(self, layer: int, positions: torch.Tensor, /) -> None:
        if self._residents is not None:
            self._selection = HotRows(position_rows(positions, self._residents))
            return
        cache = self._cache
        self._being_read = positions
        with self._beside():
            swap_in(
                self._swaps,
                positions,
                self._requests,
                self._plan.visible,
                cache.group_tables[cache.groups[layer]],
                self._plan.page_table,
                cache.host_bytes[:, layer],
                cache.hot_bytes[:, layer],
            )
            self._note_fetched(layer)
            # the plan stays as it is until all layers of the group have their rows
            for follower, group in enumerate(cache.groups):
                if follower > layer and group == cache.groups[layer]:
                    copy_misses(self._swaps, cache.host_bytes[:, follower], cache.hot_bytes[:, follower])
                    self._note_fetched(follower)

    def selected(self, layer: int) -> RowPlaces:
        if layer in self._fetched:
            torch.cuda.current_stream(self._cache.device).wait_event(self._fetched[layer])
        if layer == self._last_layer:
            with self._beside():
                self._write_back()
        return RowPlaces(self._pages(layer), self._selection)

    def finish(self) -> None:
        if self._cache.side_stream is not None:
            torch.cuda.current_stream(self._cache.device).wait_stream(self._cache.side_stream)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """What is enqueued within comes after all that the step has enqueued, and runs beside what it enqueues next."""
        side = self._cache.side_stream
        if side is None:
            yield
            return
        side.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(side):
            yield

    def _note_fetched(self, layer: int) -> None:
        """The rows of this layer are there when what the side stream has so far is done."""
        if self._cache.side_stream is not None:
            self._fetched[layer] = self._cache.side_stream.record_event()

    def _write_back(self) -> None:
        """Rows of a step's new tokens are not evicted in that step, so nothing else touches them meanwhile."""
        cache = self._cache
        hot_rows = HotRows(self._hot_rows[cache.layer_groups])
        write_back(cache.hot_bytes, hot_rows, cache.host_bytes, self._host_rows)
        cache.rows_written += (self._host_rows >= 0).sum() * len(cache.groups)

    def _pages(self, layer: int) -> torch.Tensor:
        (pages,) = self._cache.hot.layer(layer)
        return pages.squeeze(1)


def all_resident(cache: HiSparseCache, slices: Sequence[SequenceSlice]) -> bool:
    """Whether a step of these sequences, given now, finds all its rows in their hot buffers. One of none does not."""
    return bool(slices) and all(
        piece.hot_slot is not None and cache.is_resident(piece.hot_slot, piece.end) for piece in slices
    )
