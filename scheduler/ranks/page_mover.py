"""The copies of a rank that go on beside its steps: pages to host memory and back, rows into hot buffers.

A thread and, on a GPU, a stream of their own. A copy begins when the steps that were enqueued before it are done: they
may have written what it reads, or read what it overwrites. Steps that come after it touch none of its memory before it
has been reported (scheduler/decode/memory/background_copies.py).
"""

import logging
import queue
import threading
import time
from collections.abc import Callable

import torch

from ...kernels.backends.streams import use_own_stream, wait_for_stream
from ...memory.hisparse.cache import HiSparseCache
from ...memory.kv_pool import KvCache
from ...memory.page_store import PageStore
from ..messages.effects import DropPages, LoadPages, OpenHot, SavePages

log = logging.getLogger(__name__)

CopyCommand = SavePages | LoadPages | DropPages | OpenHot


class PageMover:
    """Carries out copies one after another. Owns a thread and the store of retracted requests.

    `on_done` is called on that thread with the number of a copy and the seconds it took. After a failure, which
    `on_failed` hears of, nothing more is copied.
    """

    def __init__(
        self,
        cache: KvCache,
        store: PageStore,
        *,
        on_done: Callable[[int, float], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._cache = cache
        self._store = store
        self._on_done = on_done
        self._on_failed = on_failed
        self._commands: queue.SimpleQueue[tuple[CopyCommand, torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="page-mover", daemon=True)
        self._thread.start()

    def give(self, command: CopyCommand) -> None:
        """Queue a copy, to begin after what this thread has enqueued so far. Returns at once."""
        enqueued: torch.cuda.Event | None = None
        if self._cache.device.type == "cuda":
            enqueued = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            enqueued.record(torch.cuda.current_stream(self._cache.device))
        self._commands.put((command, enqueued))

    def close(self) -> None:
        """Make the copies that are queued, and end."""
        self._commands.put(None)
        self._thread.join()
        self._store.close()

    def _work(self) -> None:
        try:
            use_own_stream(self._cache.device)
            while (entry := self._commands.get()) is not None:
                command, enqueued = entry
                if enqueued is not None:
                    enqueued.synchronize()
                self._carry_out(command)
        except Exception as error:
            log.exception("copying KV beside the steps")
            self._on_failed(f"copying KV beside the steps failed: {type(error).__name__}: {error}")

    def _carry_out(self, command: CopyCommand) -> None:
        started = time.monotonic()
        match command:
            case SavePages(rid=rid, pages=pages):
                self._store.save(rid, pages)
            case LoadPages(rid=rid, pages=pages):
                self._store.load(rid, pages)
            case DropPages(rid=rid):
                self._store.drop(rid)
                return
            case OpenHot(hot_pages=hot_pages, pages=pages, tokens=tokens):
                assert isinstance(self._cache, HiSparseCache), "only a HiSparse cache has hot buffers"
                self._cache.load_rows(hot_pages, pages, tokens)
        wait_for_stream(self._cache.device)
        if command.copy is not None:
            self._on_done(command.copy, time.monotonic() - started)
