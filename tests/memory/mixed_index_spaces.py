"""Uses of index spaces. mypy checks this file; no test runs it.

Lines with `type: ignore` mix two index spaces. If mypy stopped refusing one of them, it would report its comment as
unused (`warn_unused_ignores`, part of `strict`). Lines without a comment are correct.
"""

import torch

from pdserve.kernels.hisparse.slot_tables import SlotTables
from pdserve.kernels.hisparse.write_back import write_back
from pdserve.memory.hisparse.cache import HiSparseCache
from pdserve.memory.hisparse.shared_pool import PoolOverlay
from pdserve.memory.index_spaces import HotPage, KvPage, RequestSlot
from pdserve.memory.prefix_cache import PrefixCache
from pdserve.models.layers.batch import ForwardBatch
from pdserve.models.layers.latent_rows import new_token_rows
from pdserve.scheduler.decode.memory.holds import Holds
from pdserve.scheduler.decode.memory.hot_buffers import HotBuffer, HotBuffers
from pdserve.scheduler.decode.memory.page_lending import Loan
from pdserve.scheduler.decode.requests.request import Request
from pdserve.scheduler.messages.ranks import CopyPage, OpenHot, ResizeHot


def leader(buffer: HotBuffer, request: Request, hot: HotBuffers, holds: Holds, prefixes: PrefixCache) -> None:
    assert request.grant is not None
    OpenHot(1, buffer.slot, tuple(buffer.pages), tuple(request.pages), 3, buffer.capacity)
    OpenHot(1, buffer.slot, tuple(request.pages), tuple(buffer.pages), 3, buffer.capacity)  # type: ignore[arg-type]
    ResizeHot(buffer.pages[0], tuple(buffer.pages), 8)  # type: ignore[arg-type]
    ResizeHot(buffer.slot, tuple(request.pages), 8)  # type: ignore[arg-type]
    CopyPage(1, request.pages[0], buffer.pages[0])  # type: ignore[arg-type]
    holds.release(request.grant)
    holds.release(buffer.grant)  # type: ignore[arg-type]
    hot.allocator.release(buffer.grant)
    hot.allocator.release(request.grant)  # type: ignore[arg-type]
    hot.allocator.grant("a", 1, shared=request.pages)  # type: ignore[arg-type]
    prefixes.insert((1, 2), buffer.pages)  # type: ignore[arg-type]
    request.pages.append(7)  # type: ignore[arg-type]


def lender(buffer: HotBuffer, loan: Loan, overlay: PoolOverlay, holds: Holds, hot: HotBuffers) -> None:
    buffer.pages += overlay.hot_pages_under(loan.grant.pages)
    buffer.pages += loan.grant.pages  # type: ignore[arg-type]
    overlay.hot_pages_under(loan.hot_pages)  # type: ignore[arg-type]
    overlay.local_pages(loan.hot_pages, overlay)
    overlay.local_pages(loan.grant.pages, overlay)  # type: ignore[arg-type]
    buffer.pages += overlay.local_pages(loan.hot_pages, overlay)  # type: ignore[arg-type]
    holds.release(loan.grant)
    hot.allocator.release(loan.grant)  # type: ignore[arg-type]


def rank(cache: HiSparseCache, slot: RequestSlot, hot_pages: list[HotPage], pages: list[KvPage]) -> None:
    cache.open(slot, hot_pages, 3, 8)
    cache.open(slot, pages, 3, 8)  # type: ignore[arg-type]
    cache.open(hot_pages[0], hot_pages, 3, 8)  # type: ignore[arg-type]
    cache.load_rows(hot_pages, pages, 3)
    cache.load_rows(pages, hot_pages, 3)  # type: ignore[arg-type]
    cache.resize(slot, pages, 8)  # type: ignore[arg-type]


def step(cache: HiSparseCache, tables: SlotTables, batch: ForwardBatch, slots: torch.Tensor) -> None:
    host_rows = new_token_rows(batch, 8, None)
    hot_rows = tables.newest_rows(slots, batch.positions)
    write_back(cache.hot_bytes, hot_rows, cache.host_bytes, host_rows)
    write_back(cache.host_bytes, host_rows, cache.hot_bytes, hot_rows)  # type: ignore[arg-type]
    write_back(cache.hot_bytes, slots, cache.host_bytes, host_rows)  # type: ignore[arg-type]
    write_back(cache.hot_bytes, hot_rows, cache.host_bytes, batch.positions)  # type: ignore[arg-type]
    write_back(cache.hot_bytes, hot_rows, cache.host_bytes, cache.swaps(1).miss_rows)  # type: ignore[arg-type]
    write_back(cache.hot_bytes, cache.swaps(1).miss_rows, cache.host_bytes, cache.swaps(1).miss_sources)
