"""Compares the KV that a decode rank has received with the checksums of what prefill sent."""

from collections.abc import Sequence

import torch

from ....memory.hisparse.cache import HiSparseCache
from ....memory.kv_pool import KvCache
from ....transfer.data.local_pool import LocalPool
from ....transfer.protocol.checksum import add_sums, block_sum
from ...messages.ranks import VerifyKv


def verify_kv(
    command: VerifyKv, pools: Sequence[LocalPool], cache: KvCache, *, rank: int, peer_rank: int
) -> tuple[int, str | None]:
    """Returns the number of chunks that were compared, and the first difference from what was sent. `peer_rank` is the
    number of `rank` for peers.
    """
    for count, chunk in enumerate(command.chunks):
        span = f"tokens [{chunk.token_start}, {chunk.token_end})"
        if len(chunk.checksums) <= peer_rank:
            return count, f"prefill sent no checksum for {span}"
        found = add_sums(
            block_sum(_read_tokens(pool, cache, command, chunk.token_start, chunk.token_end), pool.layout)
            for pool in pools
        )
        if found != chunk.checksums[peer_rank]:
            return count, f"KV checksum differs for {span} on rank {rank}"
    return len(command.chunks), None


def _read_tokens(pool: LocalPool, cache: KvCache, command: VerifyKv, start: int, end: int) -> list[torch.Tensor]:
    """These tokens of a transfer, from where prefill has written them."""
    if command.hot_pages and isinstance(cache, HiSparseCache) and pool.memory is cache.host:
        return cache.hot.read_tokens(cache.local_pages(command.hot_pages), start, end)
    return pool.memory.read_tokens(command.pages, start, end)
