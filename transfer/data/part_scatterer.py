"""The staged path on a decode rank: scatters parts from the ring into their pages.

Scatters run on their own thread, and on a GPU on their own stream, so scatters and queued steps do not wait for each
other. That is safe: nothing else uses the pages of a running transfer, and a step that reads them is issued only after
the scatter is reported.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable

import torch

from ...kernels.backends.streams import use_own_stream, wait_for_arrivals, wait_for_stream
from ...kernels.staging.kv_stage import kv_scatter, warm_up_kv_stage
from ..protocol.layout import KvLayout
from ..protocol.messages import StagePart
from .chunks import PartScatter

log = logging.getLogger(__name__)


class PartScatterer:
    """Scatters parts of one ring into one pool, in order. Owns a thread.

    `on_scattered` and `on_failed` are called on that thread. After a failure nothing more is scattered: after a GPU
    error the state of its memory is unknown.
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
        """`ring` is uint8; `pool` is `[page, layer, plane, head, token, dim]`, and not in use yet: the kernel is
        compiled and run on it once, so that the first part does not wait for the compilation.
        """
        self._ring = ring
        self._pool = pool
        self._layout = layout
        self._on_scattered = on_scattered
        self._on_failed = on_failed
        self.busy_since: float | None = None
        """When the scatter that runs now began. May be read from another thread."""
        self._commands: queue.SimpleQueue[PartScatter | None] = queue.SimpleQueue()
        warm_up_kv_stage(pool)
        wait_for_stream(pool.device)  # before the first scatter, on another stream
        self._thread = threading.Thread(target=self._work, name="scatter", daemon=True)
        self._thread.start()

    def scatter(self, command: PartScatter) -> None:
        """Queue a part. Returns at once."""
        self._commands.put(command)

    def close(self) -> None:
        """Scatter the queued parts, then end the thread."""
        self._commands.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            use_own_stream(self._pool.device)
            while (command := self._commands.get()) is not None:
                self.busy_since = time.monotonic()
                self._scatter(command)
                wait_for_stream(self._pool.device)
                self.busy_since = None
                self._on_scattered(command.part)
        except Exception as error:
            log.exception("error while scattering staged KV")
            self._on_failed(f"scattering staged KV failed: {error!r}")

    def _scatter(self, command: PartScatter) -> None:
        block, layout = command.part.block, self._layout
        wait_for_arrivals(self._pool.device)
        kv_scatter(
            self._ring[command.offset : command.offset + command.size_bytes],
            self._pool,
            torch.tensor(command.pages, dtype=torch.int32, device=self._pool.device),
            start=command.start,
            end=command.start + command.part.tokens,
            layers=range(block.layer_start - layout.layer_start, block.layer_end - layout.layer_start),
            heads=range(block.head_start - layout.head_start, block.head_end - layout.head_start),
        )
