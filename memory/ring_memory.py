"""Memory of a decode rank's staging ring, and its size."""

import logging

import torch

from ..common.arithmetic import round_up
from ..common.errors import StartupError
from ..configs.schema import DecodeConfig, ServerConfig
from .kv_pool import PROBE_BYTES

log = logging.getLogger(__name__)

MIB = 1 << 20
RING_TOKENS = 4096
MAX_SHARE_BYTES = 64 * MIB
ROUND_BYTES = 4096


def may_stage(config: ServerConfig, kv_heads: int) -> bool:
    """Whether this server may stage dense KV of a model with `kv_heads` heads, so that memory must be kept for it.

    A single head is on every rank of both sides, so it is never sliced, and `auto` stages slices only. Without a ring
    on decode, a peer with `staging: on` sends directly; prefill allocates its buffers when needed, or fails.
    """
    return config.staging == "on" or (config.staging == "auto" and kv_heads > 1)


def ring_bytes(config: DecodeConfig, token_bytes: int) -> int:
    """Bytes of the ring of a rank that has `token_bytes` of KV per token.

    Default: 2 x min(KV of 4096 tokens, 64 MiB), what prefill computes in one or two steps, so that one chunk is written
    while another is scattered. Raises StartupError if the configured size holds less than one token.
    """
    if config.staging_ring_mib is None:
        size = 2 * min(RING_TOKENS * token_bytes, MAX_SHARE_BYTES)
    else:
        size = int(config.staging_ring_mib * MIB)
    size = round_up(size, ROUND_BYTES)
    if size < token_bytes:
        raise StartupError(
            f"staging_ring_mib = {config.staging_ring_mib} is less than one token, which takes {token_bytes} bytes"
        )
    return size


class RingMemory:
    """Owns the bytes. On a GPU they are an allocation of their own: CUDA IPC exports whole allocations, and a peer
    computes offsets from the start of the exported one.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self._pool = torch.cuda.MemPool()  # its first tensor is at the start of a new allocation
            with torch.cuda.use_mem_pool(self._pool, device):
                memory = torch.empty(size_bytes + PROBE_BYTES, dtype=torch.uint8, device=device)
        else:
            memory = torch.empty(size_bytes + PROBE_BYTES, dtype=torch.uint8)
        self.data, self.probe = memory[:size_bytes], memory[size_bytes:]
        self.registered_bytes = len(memory)

    @property
    def base_address(self) -> int:
        return self.data.data_ptr()
