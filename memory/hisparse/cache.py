"""The KV cache of a HiSparse rank: all rows in host memory, and on the GPU the hot rows of every running request.

    host      latent rows of all tokens, in pinned memory; prefill writes here
    indexer   indexer keys of all tokens, on the device
    hot       latent rows on the device, in separate pages; each running request has some for its hot buffer

Page p of a sequence is page p of both the host and the indexer pool, which are the pools of the cache.

On the device, the indexer and hot pools overlap (shared_pool.py): free pages of keys are lent to hot buffers. All pools
have the same page size. kernels/hisparse/slot_tables.py maps tokens to slots of a hot buffer,
kernels/hisparse/swap_in.py fetches rows, models/layers/hot_rows.py uses both in a step. All operations are enqueued on
torch's current stream, which also runs the steps: they take effect in order, and nothing waits.
"""

from collections.abc import Sequence

import torch

from ...common.errors import StartupError
from ...kernels.backends.streams import wait_for_stream
from ...kernels.hisparse.slot_tables import HotRows, KvRows, SlotTables, buffer_pages, check_geometry
from ...kernels.hisparse.swap_plan import SwapPlan
from ...kernels.hisparse.write_back import write_back
from ..index_spaces import HotPage, KvPage, LocalHotPage, RequestSlot
from ..kv_pool import KvCache, KvPool
from ..page_store import copy_runs
from ..pages import pages_for
from .shared_pool import PoolOverlay


class HiSparseError(AssertionError):
    """Contradictory tables of a hot buffer: a bug, and attention has read wrong rows."""


class HiSparseCache(KvCache):
    """Owns the three pools and the tables of up to `slots` running requests.

    The scheduler decides which pages of keys are lent, and so which hot pages exist besides the hot pool's own: the
    same bytes never serve as both. HotPage ids are those of `overlay`, which all ranks have agreed on.
    """

    def __init__(
        self,
        host: KvPool,
        indexer: KvPool,
        hot: KvPool,
        *,
        slots: int,
        hot_rows: int,
        max_context: int,
        top_k: int,
        groups: Sequence[int],
        overlay: PoolOverlay | None = None,
    ) -> None:
        """`groups[i]` is the index group of local layer i: the layers of one group are adjacent and select the same
        tokens. `overlay` defaults to that of this rank. Raises StartupError for incompatible sizes.
        """
        super().__init__(host, indexer)
        assert len(groups) == hot.num_layers == host.num_layers, "every layer has an index group"
        assert (hot.page_size, hot.head_dim, hot.data.dtype) == (host.page_size, host.head_dim, host.data.dtype)
        device, page_size = hot.data.device, hot.page_size
        if hot_rows % page_size:
            raise StartupError(f"hot_rows = {hot_rows} must be a multiple of page_size = {page_size}")
        here = PoolOverlay.of(indexer.num_pages, kv_page_bytes=indexer.page_bytes, hot_page_bytes=hot.page_bytes)
        self.overlay, self._overlay_here = overlay or here, here
        self._shared = hot.base_address == indexer.base_address
        first_own, covered = (self.overlay.covered, here.covered) if self._shared else (0, 0)
        self.own_hot_pages = range(first_own, first_own + hot.num_pages - covered)
        """Hot pages that never overlap keys."""
        if len(self.own_hot_pages) < buffer_pages(hot_rows, page_size):
            raise StartupError(
                f"the hot pool has {len(self.own_hot_pages)} pages of {page_size} rows: one buffer of hot_rows = "
                f"{hot_rows} and the newest token takes {buffer_pages(hot_rows, page_size)}"
            )
        try:
            check_geometry(
                top_k=top_k,
                hot_rows=hot_rows,
                requests=slots,
                max_context=max_context,
                page_size=page_size,
                row_bytes=host.head_token_bytes,
                host_rows=host.num_pages * page_size,
                hot_pool_rows=hot.num_pages * page_size,
                device=device,
            )
        except ValueError as error:
            raise StartupError(f"HiSparse cannot run with these sizes: {error}") from error
        self.host, self.hot, self.groups = host, hot, tuple(groups)
        self.tables = SlotTables.allocate(
            groups=max(groups) + 1,
            requests=slots,
            hot_rows=hot_rows,
            max_context=max_context,
            page_size=page_size,
            device=device,
        )
        self.group_tables = [self.tables.group(index) for index in range(max(groups) + 1)]
        self.host_bytes, self.hot_bytes = _as_bytes(host), _as_bytes(hot)
        self.layer_groups = torch.tensor(self.groups, device=device)
        self.side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.rows_written = torch.zeros(1, dtype=torch.int64, device=device)
        self._capacities = [hot_rows] * slots
        """By request slot: the value of `tables.capacity` that a step enqueued now will see."""
        self._swaps = SwapPlan.allocate(slots, top_k, device)
        self._group_layers = torch.bincount(torch.tensor(self.groups)).tolist()
        self._reading: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._counts = [[0, 0]] * len(self._group_layers), 0

    @property
    def device(self) -> torch.device:
        """The device that steps run on."""
        return self.hot.data.device

    @property
    def device_bytes(self) -> int:
        keys = 0 if self._shared else self.size_bytes - self.host.size_bytes
        return keys + self.hot.size_bytes + self.tables.size_bytes

    def swaps(self, batch: int) -> SwapPlan:
        """The swap plan of a step with `batch` rows; all steps share its memory."""
        return self._swaps.first(batch)

    def close(self) -> None:
        self.wait()
        super().close()

    def wait(self) -> None:
        """Wait for all enqueued work: its writes are then in host memory, and it reads nothing any more."""
        wait_for_stream(self.device)

    def open(self, slot: RequestSlot, hot_pages: Sequence[HotPage], tokens: int, capacity: int) -> None:
        """Assign this slot to a request of `tokens` tokens.

        `hot_pages` hold its buffer; while the sequence is shorter than that, at least its tokens and the next one. If
        `tokens` is within `capacity` it is fully resident, and `load_rows` must copy its rows before it runs.
        Otherwise its buffer starts empty.
        """
        self._set_pages(slot, hot_pages, tokens + 1, capacity)
        self.tables.admit(slot, resident=tokens <= capacity)

    def load_rows(
        self, hot_pages: Sequence[HotPage], pages: Sequence[KvPage], tokens: int, *, exact: bool = False
    ) -> None:
        """Copy the first `tokens` rows of a request from `pages` of host memory to its hot buffer, page by page, on the
        current stream, which may differ from that of the steps. With `exact`, other rows of the last page stay.
        """
        used = tokens // self.page_size if exact else pages_for(tokens, self.page_size)
        local_pages = self.local_pages(hot_pages)
        for target, source, count in copy_runs(local_pages[:used], pages[:used], self.host.pages_per_chunk):
            self.hot.data[target : target + count].copy_(self.host.data[source : source + count], non_blocking=True)
        rest = tokens - used * self.page_size
        if rest > 0:
            rows = self.host.data[pages[used], :, :, :, :rest]
            self.hot.data[local_pages[used], :, :, :, :rest].copy_(rows)

    def write_back_rows(self, hot_pages: Sequence[HotPage], pages: Sequence[KvPage], start: int, end: int) -> None:
        """Copy rows of a hot buffer, in which token p is in row p, to `pages` of host memory: from the page of token
        `start` up to token `end`. Rows from `end` on are not touched, because a step may write them at the same time.
        Runs on the current stream, which may differ from that of the steps.
        """
        first, full, size = start // self.page_size, end // self.page_size, self.page_size
        local_pages = self.local_pages(hot_pages)
        for source, target, count in copy_runs(local_pages[first:full], pages[first:full], self.host.pages_per_chunk):
            self.host.data[target : target + count].copy_(self.hot.data[source : source + count], non_blocking=True)
        if end % size == 0:
            return
        rows = torch.arange(end - full * size, dtype=torch.int32, device=self.device)
        from_rows = HotRows((rows + local_pages[full] * size).expand(self.hot.num_layers, -1))
        write_back(self.hot_bytes, from_rows, self.host_bytes, KvRows(rows + pages[full] * size))

    def local_pages(self, hot_pages: Sequence[HotPage]) -> Sequence[LocalHotPage]:
        """The pages of this rank's hot pool that these hot pages are."""
        return self._overlay_here.local_pages(hot_pages, self.overlay)

    def resize(self, slot: RequestSlot, hot_pages: Sequence[HotPage], capacity: int) -> None:
        """Set the pages and the capacity of a buffer. Pages that remain keep their position at the front.

        The capacity may be lowered to the size of the buffer at any time, and raised only while the sequence is within
        the old one.
        """
        self._set_pages(slot, hot_pages, 1, capacity)

    def is_resident(self, slot: int, tokens: int) -> bool:
        """Whether a sequence of `tokens` tokens is fully resident in a step that is enqueued now."""
        return tokens <= self._capacities[slot]

    def _set_pages(self, slot: RequestSlot, hot_pages: Sequence[HotPage], tokens: int, capacity: int) -> None:
        """Assign pages, which must hold `tokens` tokens if these are within the capacity, else a buffer."""
        local_pages = self.local_pages(hot_pages)
        rows, needed = len(local_pages) * self.page_size, tokens if tokens <= capacity else self.tables.hot_rows + 1
        assert rows >= needed, f"{len(local_pages)} hot pages of {self.page_size} rows do not hold {needed}"
        assert all(0 <= page < self.hot.num_pages for page in local_pages), f"hot pages are {local_pages}"
        self._capacities[slot] = capacity
        self.tables.set_pages(slot, local_pages, capacity)

    def copy_page(self, source: int, destination: int, tokens: int | None = None) -> None:
        self.wait()
        super().copy_page(source, destination, tokens)

    def counters(self) -> dict[str, float]:
        """Totals since start: hits and misses of evicting sequences, bytes fetched for misses, rows written back. On a
        GPU, returns the values of the previous call, so that it does not wait.
        """
        if self._reading is None or self._reading[1].query():  # type: ignore[no-untyped-call]  # torch leaves it untyped
            if self._reading is not None:
                self._read_counts(self._reading[0])
                self._reading = None
            totals = torch.cat((self.tables.lookups.flatten(), self.rows_written))
            if totals.device.type == "cuda":
                landing = torch.empty(totals.shape, dtype=totals.dtype, pin_memory=True)
                landing.copy_(totals, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                event.record(torch.cuda.current_stream(self.device))
                self._reading = landing, event
            else:
                self._read_counts(totals)
        lookups, written = self._counts
        fetched = sum(misses * layers for (_, misses), layers in zip(lookups, self._group_layers, strict=True))
        return {
            "hits": sum(hits for hits, _ in lookups),
            "misses": sum(misses for _, misses in lookups),
            "bytes_swapped_in": fetched * self.host.head_token_bytes,
            "write_backs": written,
        }

    def _read_counts(self, totals: torch.Tensor) -> None:
        *lookups, written = totals.tolist()
        self._counts = [lookups[at : at + 2] for at in range(0, len(lookups), 2)], written

    def check_integrity(self) -> None:
        """Raise HiSparseError if tables of a slot are inconsistent. Waits for the device: for tests and idle time."""
        slots = torch.arange(self.tables.hot_rows + 1, device=self.device)
        for group, tables in enumerate(self.group_tables):
            tokens, order, token_slots = (
                table.long() for table in (tables.slot_tokens, tables.eviction_order, tables.token_slots)
            )
            held = tokens >= 0
            sound = {
                "the eviction order does not list every slot once": order.sort().values.eq(slots).all(dim=1),
                "the slot kept for the next token holds another": tokens.gather(1, order[:, -1:]).squeeze(1) < 0,
                "a token is in two slots, or its entry names another slot": (
                    token_slots.gather(1, tokens.clamp(min=0)).eq(slots) | ~held
                ).all(dim=1),
                "a token has an entry but is in no slot": (token_slots >= 0).sum(dim=1) == held.sum(dim=1),
            }
            for problem, fine in sound.items():
                if not fine.all():
                    request = int(fine.logical_not().nonzero()[0])
                    raise HiSparseError(f"index group {group}, request slot {request}: {problem}")


def _as_bytes(pool: KvPool) -> torch.Tensor:
    """[pages, layers, page_size, row_bytes] uint8: the rows of a latent pool, as kernels copy them."""
    return pool.data.view(torch.uint8)[:, :, 0, 0]
