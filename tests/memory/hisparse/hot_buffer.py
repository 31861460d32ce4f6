"""Opens a hot buffer for a running request."""

from collections.abc import Sequence

from pdserve.memory.hisparse.cache import HiSparseCache
from pdserve.memory.index_spaces import HotPage, KvPage, RequestSlot


def open_loaded(
    cache: HiSparseCache,
    slot: RequestSlot,
    hot_pages: Sequence[HotPage],
    pages: Sequence[KvPage],
    tokens: int,
    capacity: int,
) -> None:
    """Open a hot buffer and, if the request is fully resident, load its rows."""
    cache.open(slot, hot_pages, tokens, capacity)
    if tokens <= capacity:
        cache.load_rows(hot_pages, pages, tokens)
