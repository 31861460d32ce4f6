"""The KV cache of a HiSparse rank: all rows in host memory, and on the GPU the hot ones of every running request.

    host      latent rows, pinned: the copy that counts, and what prefill writes. A sequence's page p ...
    indexer   keys, on the device                                             ... is page p of both: the cache's pools
    hot       latent rows, on the device, in pages of their own: a running request has some, its hot buffer

On the device the two lie over each other (lots.py): free pages of keys are lent to hot buffers. All pools have the same
page size. kernels/hisparse/slot_tables.py says which token is where in a hot buffer, kernels/hisparse/swap_in.py how
rows come in, models/layers/hot_rows.py how a step goes about it. What is done here is enqueued on torch's current
stream, the one that steps run on: an order given after a step counts after that step, and nothing waits.
"""

from collections.abc import Sequence

import torch

from ...configs.errors import StartupError
from ...kernels.backends.streams import wait_for_stream
from ...kernels.hisparse.slot_tables import SlotTables, buffer_pages, check_geometry
from ...kernels.hisparse.swap_plan import SwapPlan
from ..index_spaces import HotPage, HotPlace, KvPage, RequestSlot
from ..kv_pool import KvCache, KvPool
from ..page_store import stretches
from .shared_pool import PoolOverlay


class HiSparseError(AssertionError):
    """The tables of a hot buffer contradict each other: a bug, and attention has read wrong rows."""


class HiSparseCache(KvCache):
    """Owns the three pools and the tables. Up to `slots` requests run at a time, each under a number of its own.

    Which pages of keys are lent, and so which hot pages exist beside those that are the hot pool's own, is decided
    elsewhere: the same bytes are never both. HotPages are those of `overlay`, on which all ranks have agreed.
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
        """`groups[i]` is the index group of local layer i: layers of one group are neighbours and select the same
        tokens. `overlay` are by default those of this rank alone. Raises StartupError for sizes that do not go
        together.
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
        """Hot pages that are no keys at any time."""
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
            raise StartupError(f"HiSparse cannot run so: {error}") from error
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
        """Of each request slot: what `tables.capacity` will be for a step that is given now."""
        self._swaps = SwapPlan.allocate(slots, top_k, device)
        self._group_layers = torch.bincount(self.layer_groups.cpu()).tolist()
        self._reading: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._counts = [[0, 0]] * len(self._group_layers), 0

    @property
    def device(self) -> torch.device:
        """Where steps run."""
        return self.hot.data.device

    @property
    def device_bytes(self) -> int:
        keys = 0 if self._shared else self.size_bytes - self.host.size_bytes
        return keys + self.hot.size_bytes + self.tables.size_bytes

    def swaps(self, batch: int) -> SwapPlan:
        """The plan of a step of this many rows, in memory that all steps share."""
        return self._swaps.first(batch)

    def close(self) -> None:
        self.wait()
        super().close()

    def wait(self) -> None:
        """Until all that was enqueued is done: what it wrote is in host memory then, and nothing reads it any more."""
        wait_for_stream(self.device)

    # -- hot buffers -------------------------------------------------------------------------------------------

    def open(self, slot: RequestSlot, hot_pages: Sequence[HotPage], tokens: int, capacity: int) -> None:
        """A request of `tokens` tokens takes this slot.

        `hot_pages` hold its buffer, or at least its next token for as long as it is shorter. With `tokens` within
        `capacity` it is resident: `load_rows` brings its rows before it runs. Otherwise its buffer starts empty.
        """
        places = self._overlay_here.places(hot_pages, self.overlay)
        self._check(places, tokens + 1, capacity)
        self._capacities[slot] = capacity
        self.tables.admit(slot, resident=tokens <= capacity)
        self.tables.set_pages(slot, places, capacity)

    def load_rows(self, hot_pages: Sequence[HotPage], pages: Sequence[KvPage], tokens: int) -> None:
        """Copy the first `tokens` rows of a request, in `pages` of host memory, to its hot buffer, page by page. On the
        current stream, which need not be that of the steps.
        """
        used = -(-tokens // self.page_size)
        places = self._overlay_here.places(hot_pages, self.overlay)[:used]
        for target, source, count in stretches(places, pages[:used], self.host.pages_per_chunk):
            self.hot.data[target : target + count].copy_(self.host.data[source : source + count], non_blocking=True)

    def resize(self, slot: RequestSlot, hot_pages: Sequence[HotPage], capacity: int) -> None:
        """The buffer has these pages and this capacity from now on; the pages that stay are the same, and first.

        A capacity may be lowered to the size of the buffer at any time, and raised while the sequence is within the
        old one.
        """
        places = self._overlay_here.places(hot_pages, self.overlay)
        self._check(places, 1, capacity)
        self._capacities[slot] = capacity
        self.tables.set_pages(slot, places, capacity)

    def is_resident(self, slot: int, tokens: int) -> bool:
        """Whether a sequence of so many tokens has them all in its buffer, in a step that is given now."""
        return tokens <= self._capacities[slot]

    def _check(self, places: Sequence[HotPlace], tokens: int, capacity: int) -> None:
        rows, needed = len(places) * self.page_size, tokens if tokens <= capacity else self.tables.hot_rows + 1
        assert rows >= needed, f"{len(places)} hot pages of {self.page_size} rows do not hold {needed}"
        assert all(0 <= place < self.hot.num_pages for place in places), f"hot pages are {places}"

    # -- pages -------------------------------------------------------------------------------------------------

    def copy_page(self, source: int, destination: int) -> None:
        self.wait()
        super().copy_page(source, destination)

    # -- watching ----------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, float]:
        """Totals since the start: hits and misses of sequences beyond their capacity, bytes that misses have brought
        in, rows that were written back. On a GPU they are those of the call before: it waits for nothing.
        """
        if self._reading is None or self._reading[1].query():  # type: ignore[no-untyped-call]  # torch leaves it so
            if self._reading is not None:
                self._take(self._reading[0])
                self._reading = None
            totals = torch.cat((self.tables.lookups.flatten(), self.rows_written))
            if totals.device.type == "cuda":
                landing = torch.empty(totals.shape, dtype=totals.dtype, pin_memory=True)
                landing.copy_(totals, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                event.record(torch.cuda.current_stream(self.device))
                self._reading = landing, event
            else:
                self._take(totals)
        lookups, written = self._counts
        fetched = sum(misses * layers for (_, misses), layers in zip(lookups, self._group_layers, strict=True))
        return {
            "hits": sum(hits for hits, _ in lookups),
            "misses": sum(misses for _, misses in lookups),
            "bytes_swapped_in": fetched * self.host.head_token_bytes,
            "write_backs": written,
        }

    def _take(self, totals: torch.Tensor) -> None:
        *lookups, written = totals.tolist()
        self._counts = [lookups[at : at + 2] for at in range(0, len(lookups), 2)], written

    def check_integrity(self) -> None:
        """Raise HiSparseError unless the tables of every slot are sound; waits for the device. For tests and idling."""
        slots = torch.arange(self.tables.hot_rows + 1, device=self.device)
        for group, tables in enumerate(self.group_tables):
            tokens, order, places = (
                table.long() for table in (tables.slot_tokens, tables.eviction_order, tables.token_slots)
            )
            held = tokens >= 0
            sound = {
                "the eviction order is not all slots": order.sort().values.eq(slots).all(dim=1),
                "the slot kept for the next token holds another": tokens.gather(1, order[:, -1:]).squeeze(1) < 0,
                "a token is in two slots, or its entry names another": (
                    places.gather(1, tokens.clamp(min=0)).eq(slots) | ~held
                ).all(dim=1),
                "a token has an entry and is in no slot": (places >= 0).sum(dim=1) == held.sum(dim=1),
            }
            for problem, fine in sound.items():
                if not fine.all():
                    request = int(fine.logical_not().nonzero()[0])
                    raise HiSparseError(f"index group {group}, request slot {request}: {problem}")


def _as_bytes(pool: KvPool) -> torch.Tensor:
    """[pages, layers, page_size, row_bytes] uint8: the rows of a latent pool, as kernels copy them."""
    return pool.data.view(torch.uint8)[:, :, 0, 0]
