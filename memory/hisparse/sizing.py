"""Sizes of a HiSparse cache: pages in host memory, their index on the device, and hot pages on the device.

    host memory     num_pages pages of latent rows: the KV of all sequences
    device budget   num_pages pages of indexer keys, up to a multiple of a hot page + hot_pages pages of latent rows
    beside it       the tables of the hot buffers

Host memory determines the number of pages, unless their index would leave hot pages less than half of the device
budget, or less than one hot buffer per running request, or less than the longest prompt if this server computes all
prompts itself. Hot pages get what the index leaves, and free pages of the index are lent to them (shared_pool.py): with
more hot pages, more requests stay fully resident.
"""

from dataclasses import dataclass

from ...common.errors import StartupError
from ...configs.schema import DecodeConfig
from ...kernels.hisparse.slot_tables import buffer_pages, table_bytes
from ..auto_settings import KvShare
from ..pages import pages_for
from ..sizing import GIB
from .shared_pool import PoolOverlay

ARRIVING_REQUESTS = 2
"""An automatic size has pages for this many requests in addition to the running ones. Their KV arrives while the others
run, and they start as soon as a hot buffer is free. Free pages of their index are lent.
"""


@dataclass(frozen=True)
class HiSparseSize:
    """Pages of a HiSparse cache. `hot_pages` excludes those that overlap keys."""

    num_pages: int
    hot_pages: int


def hisparse_size(
    config: DecodeConfig,
    *,
    latent_token_bytes: int,
    indexer_token_bytes: int,
    hot_rows: int,
    index_groups: int,
    context_length: int,
    slots: int,
    host_bytes: int,
    device_bytes: int,
    share: KvShare,
) -> HiSparseSize:
    """Sizes for the free memory and `slots` running requests. Bytes per token and `index_groups` are those of this
    rank, whose layers may share indexers. Raises StartupError with field, limit and value.
    """
    page_size = config.page_size
    device_bytes -= table_bytes(
        groups=index_groups,
        requests=slots,
        hot_rows=hot_rows,
        max_context=context_length,
        page_size=page_size,
    )
    latent_page, indexer_page = latent_token_bytes * page_size, indexer_token_bytes * page_size
    one_buffer = buffer_pages(hot_rows, page_size)
    if config.kv_memory_gib is not None:
        budget = int(config.kv_memory_gib * GIB)
    else:
        budget = int(share.fraction * (device_bytes - share.left_bytes))
    if budget > device_bytes:
        raise StartupError(
            f"kv_memory_gib = {config.kv_memory_gib} asks for {budget / GIB:.2f} GiB, "
            f"{device_bytes / GIB:.2f} GiB are free"
        )
    num_pages = _host_pages(config, latent_page, context_length, slots, host_bytes)
    if config.kv_tokens is None:
        # a prompt that this server computes has all its rows in the hot pool, and the next one
        longest = pages_for(context_length + 1, page_size) if config.local_prefill == "always" else 0
        hot_floor = min(max(slots * one_buffer, longest), budget // 2 // latent_page)
        num_pages = min(num_pages, (budget // latent_page - hot_floor) * latent_page // indexer_page)
    most_useful = num_pages + slots * one_buffer
    overlay = PoolOverlay.of(num_pages, kv_page_bytes=indexer_page, hot_page_bytes=latent_page)
    hot_pages = min(most_useful, budget // latent_page - overlay.covered)
    if num_pages < 1 or hot_pages < one_buffer:
        raise StartupError(
            f"the device budget of {budget / GIB:.3f} GiB (kv_memory_gib or kv_memory_fraction) does not hold the "
            f"index of {max(num_pages, 1)} pages ({max(num_pages, 1) * indexer_page / GIB:.3f} GiB) and one hot buffer "
            f"of hot_rows = {hot_rows} ({one_buffer * latent_page / GIB:.3f} GiB)"
        )
    return HiSparseSize(num_pages, hot_pages)


def _host_pages(config: DecodeConfig, page_bytes: int, context_length: int, slots: int, free_bytes: int) -> int:
    if config.host_memory_gib is not None:
        budget, asked = int(config.host_memory_gib * GIB), f"host_memory_gib = {config.host_memory_gib}"
    else:
        budget, asked = (
            int(config.host_memory_fraction * free_bytes),
            f"host_memory_fraction = {config.host_memory_fraction}",
        )
    if budget > free_bytes:
        raise StartupError(f"{asked} asks for more than the {free_bytes / GIB:.2f} GiB of host memory that are free")
    pages = budget // page_bytes
    if config.kv_tokens is not None:
        wanted = pages_for(config.kv_tokens, config.page_size)
        if wanted > pages:
            raise StartupError(
                f"kv_tokens = {config.kv_tokens} takes {wanted * page_bytes / GIB:.2f} GiB of host memory, {asked} "
                f"allows {budget / GIB:.2f} GiB"
            )
        return wanted
    if pages < 1:
        raise StartupError(f"{asked} is less than one page of {page_bytes} bytes")
    useful_tokens = context_length * (slots + ARRIVING_REQUESTS)
    return min(pages, pages_for(useful_tokens, config.page_size))
