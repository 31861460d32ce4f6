"""Host memory for the KV of retracted requests: pages are copied there and back.

It is allocated at start, and page-locked if the cache is on a GPU: copies allocate nothing and run at the full PCIe
rate. Pages that do not fit go to pageable memory, which is slower.
"""

import logging
from collections.abc import Iterator, Sequence

import torch

from ..common.errors import StartupError
from .kv_pool import KvCache, KvPool
from .pages import FreePages

log = logging.getLogger(__name__)


class PageStore:
    """Copies of pages of one cache, by request name.

    Not thread-safe. GPU copies are enqueued on the current stream in call order and are asynchronous: dropped memory
    may be reused by the next `save`, whose copy runs after the copies that read it.
    """

    def __init__(self, cache: KvCache, num_pages: int) -> None:
        """Room for `num_pages` pages. Raises StartupError if it cannot be page-locked."""
        self._cache = cache
        self._pools = [(pool, _host_pool(pool, num_pages)) for pool in cache.pools] if num_pages else []
        self._free = FreePages[int](range(num_pages))
        self._slots: dict[str, list[int]] = {}
        self._overflow: dict[str, list[torch.Tensor]] = {}

    @classmethod
    def allocate(cls, cache: KvCache, size_bytes: int) -> "PageStore":
        """As many pages as fit in `size_bytes`, and at most as many as the cache has: to page-lock 4 GiB takes seconds,
        and a small cache seldom needs them. If they cannot be page-locked, logs a warning and stores none.
        """
        page_bytes = sum(pool.page_bytes for pool in cache.pools)
        try:
            return cls(cache, min(size_bytes // page_bytes, cache.num_pages))
        except StartupError as error:
            log.warning("retracted requests are copied to memory that is not page-locked: %s", error)
            return cls(cache, 0)

    def save(self, name: str, pages: Sequence[int]) -> None:
        """Copy these pages."""
        if len(pages) > len(self._free):
            self._overflow[name] = self._cache.save(pages)
            return
        slots = self._slots[name] = self._free.take(len(pages))
        self._copy(pages, slots, to_store=True)

    def load(self, name: str, pages: Sequence[int]) -> None:
        """Copy what `name` saved to the first of these pages, and drop it."""
        if name in self._overflow:
            self._cache.load(self._overflow.pop(name), pages)
            return
        slots = self._slots[name]
        self._copy(pages[: len(slots)], slots, to_store=False)
        self.drop(name)

    def drop(self, name: str) -> None:
        """Free what `name` saved."""
        if self._overflow.pop(name, None) is None:
            for slot in self._slots.pop(name):
                self._free.add(slot)

    def close(self) -> None:
        """Undo the page-locking; no copy may be in flight."""
        for _, stored in self._pools:
            stored.close()

    def _copy(self, pages: Sequence[int], slots: Sequence[int], *, to_store: bool) -> None:
        for pool, stored in self._pools:
            for page, slot, count in copy_runs(pages, slots, stored.pages_per_chunk):
                in_pool, in_store = pool.data[page : page + count], stored.data[slot : slot + count]
                target, source = (in_store, in_pool) if to_store else (in_pool, in_store)
                target.copy_(source, non_blocking=True)


def _host_pool(pool: KvPool, num_pages: int) -> KvPool:
    """A pool in host memory with pages like those of `pool`."""
    return KvPool(
        num_pages=num_pages,
        num_layers=pool.num_layers,
        num_heads=pool.num_heads,
        page_size=pool.page_size,
        head_dim=pool.head_dim,
        dtype=pool.dtype,
        device=torch.device("cpu"),
        planes=tuple(name for name in pool.planes if name != pool.scale_plane),
        scale_plane=pool.scale_plane,
        pinned=pool.on_gpu,
    )


def copy_runs(first: Sequence[int], second: Sequence[int], chunk: int) -> Iterator[tuple[int, int, int]]:
    """(start in `first`, start in `second`, length) of the longest runs in which both ascend by one, split at multiples
    of `chunk` in `second`.
    """
    start, length = (0, 0), 0
    for pair in zip(first, second, strict=True):
        if length and pair == (start[0] + length, start[1] + length) and pair[1] % chunk:
            length += 1
            continue
        if length:
            yield *start, length
        start, length = pair, 1
    if length:
        yield *start, length
