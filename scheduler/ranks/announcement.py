"""What a rank announces to peers: its pools, the hot pool of a HiSparse cache and its staging ring."""

import secrets

import msgspec

from ...memory.hisparse.cache import HiSparseCache
from ...memory.kv_pool import KvPool
from ...memory.ring_memory import RingMemory
from ...transfer.data.local_pool import LocalPool
from ...transfer.protocol.layout import KvLayout, Plane
from ...transfer.protocol.messages import Pool, StageRing


def layout_of(pool: KvPool) -> KvLayout:
    """How a pool is laid out, for peers."""
    return KvLayout(
        planes=tuple(map(Plane, pool.planes, pool.plane_token_bytes)),
        layer_start=pool.layers.start,
        layer_end=pool.layers.stop,
        head_start=pool.heads.start,
        head_end=pool.heads.stop,
        page_size=pool.page_size,
        num_pages=pool.num_pages,
        dtype=pool.dtype_name,
    )


def announced_pool(pool: LocalPool, hot: HiSparseCache | None) -> Pool:
    """A pool of a rank, whose cache is `hot` with HiSparse."""
    return Pool(
        pool.layout,
        pool.memory.base_address,
        pool.memory.size_bytes,
        memory="host" if hot is not None and pool.memory is hot.host else "device",
        probe_address=pool.memory.probe.data_ptr(),
        probe_bytes=len(pool.memory.probe),
    )


def announced_hot(cache: HiSparseCache) -> Pool:
    """The part of the hot pool that never holds keys. It is registered with the indexer pool, in whose memory it is."""
    hot, own = cache.hot, len(cache.own_hot_pages)
    first = hot.num_pages - own
    return Pool(
        msgspec.structs.replace(layout_of(hot), num_pages=own),
        hot.base_address + first * hot.page_bytes,
        own * hot.page_bytes,
        probe_address=hot.probe.data_ptr(),
        probe_bytes=len(hot.probe),
    )


def announced_ring(ring: RingMemory) -> StageRing:
    """The staging ring of a decode rank, with a new epoch."""
    return StageRing(
        ring.base_address,
        ring.size_bytes,
        epoch=secrets.randbits(62),
        memory="device" if ring.on_gpu else "host",
        probe_address=ring.probe.data_ptr(),
        probe_bytes=len(ring.probe),
    )
