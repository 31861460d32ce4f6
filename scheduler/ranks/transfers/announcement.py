"""What a rank announces to peers: its pools, the hot pool of a HiSparse cache and its staging ring."""

import os
import secrets
from collections.abc import Mapping, Sequence

import msgspec
import torch

from ....configs.setting_types import StagingSetting
from ....memory.hisparse.cache import HiSparseCache
from ....memory.kv_pool import KvPool
from ....memory.ring_memory import RingMemory
from ....transfer.data.local_pool import LocalPool
from ....transfer.mooncake.library import Transport
from ....transfer.mooncake.transports import machine_id
from ....transfer.protocol.layout import KvLayout, Plane
from ....transfer.protocol.messages import Pool, Rank, StageRing


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
    """The part of the hot pool that never holds index keys. Its memory is part of the index pool, and is registered
    with it.
    """
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


def announced_rank(
    peer_rank: int,
    pools: Sequence[LocalPool],
    hot: HiSparseCache | None,
    *,
    sessions: Mapping[Transport, str],
    ring: RingMemory | None,
    staging: StagingSetting,
    device: torch.device,
) -> Rank:
    """A rank with all of its memory. `sessions` are the addresses of its receive engines, `hot` is its cache with
    HiSparse.
    """
    on_cpu = device.type == "cpu"
    return Rank(
        rank=peer_rank,
        session=sessions.get("tcp"),
        pools=tuple(announced_pool(pool, hot) for pool in pools),
        machine=machine_id(),
        nvlink_session=sessions.get("nvlink"),
        rdma_session=sessions.get("rdma"),
        ring=announced_ring(ring) if ring is not None else None,
        staging=staging,
        hot=announced_hot(hot) if hot is not None else None,
        cpu_cores=tuple(sorted(os.sched_getaffinity(0))) if on_cpu else (),
        cpu_threads=torch.get_num_threads() if on_cpu else 0,
        gpu=str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "",
    )
