"""Defaults that depend on the device, the model and other servers on the same GPU.

                      CPU      GPU
chunk_size            512      a power of two, 1,024 to 8,192: about 50 ms of an H100's matrix products
max_running_requests  32       256; with HiSparse fewer if the tables of their hot buffers would be large
kv_memory_fraction    0.25     prefill 0.35; decode 0.9, or 0.5 if a prefill server may still start on the same GPU
"""

import socket
from contextlib import suppress
from dataclasses import dataclass

import torch

from ..common.arithmetic import round_up
from ..configs.schema import LOOPBACK_HOSTS, DecodeConfig, PrefillConfig

CPU_CHUNK_SIZE = 512
LEAST_GPU_CHUNK, MOST_GPU_CHUNK = 1024, 8192
CHUNK_PRODUCTS = 20e12
"""Tokens x parameters of a chunk: 50 ms at 800 TFLOP/s. Longer steps delay other prompts; in shorter ones the GPU waits
for the host and reads the weights more often.
"""
CPU_RUNNING_REQUESTS = 32
GPU_RUNNING_REQUESTS = 256
MOST_TABLE_SHARE = 0.05
"""Largest share of GPU memory for the tables of hot buffers."""

CPU_KV_FRACTION = 0.25
PREFILL_KV_FRACTION = 0.35
ALONE_KV_FRACTION = 0.9
SHARED_KV_FRACTION = 0.5
"""This and PREFILL_KV_FRACTION are shares of the memory that the weights of both servers leave. Both pools fit,
whichever server starts first.
"""
CONTEXT_BYTES = 1 << 29
"""About what the CUDA driver allocates per process."""
_CONNECT_TIMEOUT_S = 0.5


def auto_chunk_size(config: PrefillConfig, device: torch.device, active_parameters: int) -> int:
    """Prompt tokens per step. `active_parameters`: parameters of this rank that one token is multiplied with."""
    if config.chunk_size is not None:
        return config.chunk_size
    tokens = CPU_CHUNK_SIZE
    if device.type == "cuda":
        tokens = 1 << (int(CHUNK_PRODUCTS) // max(1, active_parameters)).bit_length() - 1
        tokens = min(max(tokens, LEAST_GPU_CHUNK), MOST_GPU_CHUNK)
    return round_up(tokens, config.page_size)


def auto_running_requests(config: DecodeConfig, device: torch.device, table_bytes: int) -> int:
    """Requests per decode batch. `table_bytes`: size of the tables of one hot buffer; 0 without HiSparse."""
    if config.max_running_requests is not None:
        return config.max_running_requests
    if device.type != "cuda":
        return CPU_RUNNING_REQUESTS
    total = torch.cuda.get_device_properties(device).total_memory
    affordable = int(MOST_TABLE_SHARE * total) // max(1, table_bytes)
    return max(CPU_RUNNING_REQUESTS, min(GPU_RUNNING_REQUESTS, affordable))


@dataclass(frozen=True)
class KvShare:
    """The KV pool gets `fraction` of the memory that is free after `left_bytes` are kept for another server."""

    fraction: float
    left_bytes: int = 0
    reason: str = "kv_memory_fraction"


def auto_kv_share(config: PrefillConfig | DecodeConfig, device: torch.device, weight_bytes: int) -> KvShare:
    """Share of free memory for the KV pool. `weight_bytes`: weights of this rank, which are loaded already."""
    if config.kv_memory_fraction is not None:
        return KvShare(config.kv_memory_fraction)
    if device.type != "cuda":
        return KvShare(CPU_KV_FRACTION)
    free, total = torch.cuda.mem_get_info(device)
    used_by_others = total - free - torch.cuda.memory_reserved(device) - CONTEXT_BYTES
    left = max(0, weight_bytes + CONTEXT_BYTES - max(0, used_by_others))
    if left >= free:  # no second server fits
        return KvShare(ALONE_KV_FRACTION)
    if isinstance(config, PrefillConfig):
        return KvShare(PREFILL_KV_FRACTION, left, "leaving room for a decode server")
    expected = _local_prefill_not_started(config) if device.index == 0 else None
    if expected is None:
        return KvShare(ALONE_KV_FRACTION)
    return KvShare(SHARED_KV_FRACTION, left, f"leaving room for the prefill server at {expected}")


def _local_prefill_not_started(config: DecodeConfig) -> str | None:
    """An endpoint in `prefill` on this machine where no server listens yet: it may still allocate on this GPU."""
    here = {*LOOPBACK_HOSTS, config.host, config.public_host}
    for endpoint in config.prefill:
        host, _, port = endpoint.rpartition(":")
        if host in here:
            with suppress(OSError), socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S):
                continue
            return endpoint
    return None
