"""The staged path on a decode rank: scatters what prefill wrote into the ring to the pages where it belongs.

A thread of its own, and on a GPU a stream of its own: a scatter waits neither for the steps that are queued nor they
for it. That is safe because the pages of a transfer under way are touched by nobody else, and no step that reads them
is given before the scatter is reported.
"""

import logging
import queue
import threading
from collections.abc import Callable

import torch

from ...kernels.backends.streams import use_own_stream, wait_for_arrivals, wait_for_stream
from ...kernels.staging.kv_stage import kv_scatter, warm_up_kv_stage
from ..data.chunks import PartScatter
from ..protocol.layout import KvLayout
from ..protocol.messages import StagePart

log = logging.getLogger(__name__)


class PartScatterer:
    """Scatters parts of one ring into one pool, in order. Owns a thread.

    `on_scattered` and `on_failed` are called on that thread. After a failure nothing more is scattered: what a GPU that
    fails has done to memory is not known.
    """

    def __init__(
        self,
        ring: torch.Tensor,
        pool: torch.Tensor,
        layout: KvLayout,
        *,
        on_scattered: Callable[[StagePart], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """`ring` is uint8; `pool` is `[page, layer, plane, head, token, dim]`. Nobody writes to it yet: it is used to
        try the kernel, so that the first part does not wait for its compilation.
        """
        self._ring = ring
        self._pool = pool
        self._layout = layout
        self._on_scattered = on_scattered
        self._on_failed = on_failed
        self._orders: queue.SimpleQueue[PartScatter | None] = queue.SimpleQueue()
        if pool.device.type == "cuda":
            warm_up_kv_stage(pool)
            wait_for_stream(pool.device)  # before the first scatter, on another stream
        self._thread = threading.Thread(target=self._work, name="scatter", daemon=True)
        self._thread.start()

    def scatter(self, order: PartScatter) -> None:
        """Queue a part. Returns at once."""
        self._orders.put(order)

    def close(self) -> None:
        """Scatter what is queued, and end."""
        self._orders.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            use_own_stream(self._pool.device)
            while (order := self._orders.get()) is not None:
                self._scatter(order)
                wait_for_stream(self._pool.device)
                self._on_scattered(order.part)
        except Exception as error:
            log.exception("scattering staged KV")
            self._on_failed(f"scattering staged KV failed: {error!r}")

    def _scatter(self, order: PartScatter) -> None:
        block, layout = order.part.block, self._layout
        wait_for_arrivals(self._pool.device)
        kv_scatter(
            self._ring[order.offset : order.offset + order.size_bytes],
            self._pool,
            torch.tensor(order.pages, dtype=torch.int32, device=self._pool.device),
            start=order.start,
            end=order.start + order.part.tokens,
            layers=range(block.layer_start - layout.layer_start, block.layer_end - layout.layer_start),
            heads=range(block.head_start - layout.head_start, block.head_end - layout.head_start),
        )
