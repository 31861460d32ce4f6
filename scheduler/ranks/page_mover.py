"""The copies that a rank makes beside its steps: pages to host memory and back, rows into hot buffers and out of them.

Copies run on their own thread and, on a GPU, on their own stream. A copy begins when the steps enqueued before it are
done, because these may write what it reads, or read what it overwrites. The exception are rows that prefill has written
to a hot buffer: no step writes them, so they are copied at once. Later steps do not write the memory of a copy until
its end is reported (scheduler/decode/memory/background_copies.py).
"""

import logging
import queue
import threading
import time
from collections.abc import Callable

import torch

from ...kernels.backends.streams import use_own_stream, wait_for_arrivals, wait_for_stream
from ...memory.hisparse.cache import HiSparseCache
from ...memory.kv_pool import KvCache
from ...memory.page_store import PageStore
from ..messages.ranks import DropPages, LoadPages, OpenHot, SavePages, WriteBackRows

log = logging.getLogger(__name__)

CopyCommand = SavePages | LoadPages | DropPages | OpenHot | WriteBackRows


class PageMover:
    """Runs copies one after another. Owns a thread and the store of retracted requests.

    It calls `on_done` on that thread, with the number of a copy and its duration. After a failure it calls `on_failed`
    and copies nothing more.
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
        self.busy_since: float | None = None
        """When the copy that runs now began. May be read from another thread."""
        self._commands: queue.SimpleQueue[tuple[CopyCommand, torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="page-mover", daemon=True)
        self._thread.start()

    def enqueue(self, command: CopyCommand) -> None:
        """Queue a copy. If it depends on steps, it begins after all work that this thread has enqueued so far. Returns
        at once.
        """
        enqueued: torch.cuda.Event | None = None
        if self._cache.device.type == "cuda" and not isinstance(command, WriteBackRows):
            wait_for_arrivals(self._cache.device)  # a page may be saved right after it was received
            enqueued = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            enqueued.record(torch.cuda.current_stream(self._cache.device))
        self._commands.put((command, enqueued))

    def close(self) -> None:
        """Make the queued copies, then end the thread."""
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
                self.busy_since = time.monotonic()
                self._run(command)
                self.busy_since = None
        except Exception as error:
            log.exception("a background copy of KV failed")
            self._on_failed(f"a background copy of KV failed: {type(error).__name__}: {error}")

    def _run(self, command: CopyCommand) -> None:
        started = time.monotonic()
        match command:
            case SavePages(rid=rid, pages=pages):
                self._store.save(rid, pages)
            case LoadPages(rid=rid, pages=pages):
                self._store.load(rid, pages)
            case DropPages(rid=rid):
                self._store.drop(rid)
                return
            case OpenHot(hot_pages=hot_pages, pages=pages, tokens=tokens, exact=exact):
                assert isinstance(self._cache, HiSparseCache), "only a HiSparse cache has hot buffers"
                self._cache.load_rows(hot_pages, pages, tokens, exact=exact)
            case WriteBackRows(hot_pages=hot_pages, pages=pages, start=start, end=end):
                assert isinstance(self._cache, HiSparseCache), "only a HiSparse cache has hot buffers"
                wait_for_arrivals(self._cache.device)
                self._cache.write_back_rows(hot_pages, pages, start, end)
        wait_for_stream(self._cache.device)
        if command.copy is not None:
            self._on_done(command.copy, time.monotonic() - started)
