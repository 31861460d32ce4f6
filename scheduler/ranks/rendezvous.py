"""The ranks of a server join their process group."""

import logging

import torch

from ...configs.schema import AnyServerConfig
from ...models.config.sharding import Shard
from ...models.layers.parallel import Backend, Parallel, nccl_available

log = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_S = 600.0
"""Longest wait of a rank for the others. A lost rank is detected long before, by its silence."""


def join_ranks(config: AnyServerConfig, rank: int, device: torch.device, meet_at: tuple[str, int] | None) -> Parallel:
    """Connect a rank with the others at the address `meet_at`; None for a single rank. Raises StartupError."""
    shard = Shard.of(
        rank,
        tp_size=config.tp,
        stages=config.pp,
        whole_experts=config.whole_experts,
        dp_attention=config.dp_size > 1,
    )
    if meet_at is None:
        return Parallel(shard, device=device)
    # NCCL needs a GPU for each rank
    own_gpu = device.type == "cuda" and not config.ranks_share_gpu
    backend: Backend = "nccl" if own_gpu and nccl_available() else "gloo"
    log.info("rank %d of %d: joining the process group at %s:%d (%s)", rank, shard.world_size, *meet_at, backend)
    host, port = meet_at
    return Parallel.connect(
        shard,
        store_host=host,
        store_port=port,
        backend=backend,
        device=device,
        timeout_s=COLLECTIVE_TIMEOUT_S,
    )
