"""Size of the KV pool: from the configuration, checked against free memory."""

import gc
from collections.abc import Callable

import torch

from ..common.errors import StartupError
from ..configs.schema import ServerConfig
from .auto_settings import KvShare
from .device import free_memory_bytes
from .pages import pages_for

GIB = 1 << 30


def check_weights_fit(weight_bytes: int, device: torch.device, *, sharers: int = 1) -> None:
    """Refuse a model whose weights exceed the free memory, before the slow load.

    `sharers`: ranks, including this one, that load the same amount onto the device.
    """
    free = free_memory_bytes(device)
    if weight_bytes * sharers > free:
        ranks = f" for {sharers} ranks" if sharers > 1 else ""
        raise StartupError(
            f"the weights need {weight_bytes * sharers / GIB:.1f} GiB{ranks} and {device} has {free / GIB:.1f} GiB "
            "free: use a smaller model, another --device or a 16-bit --dtype, or lower --kv-memory-fraction of the "
            "servers that already run on it"
        )


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Device memory that torch allocates for `work`, at its peak, and frees afterwards. On the CPU, `work` does not run
    and the result is 0.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()  # so that memory cached earlier does not hide what `work` allocates
    torch.cuda.reset_peak_memory_stats(device)
    try:
        work()
        torch.cuda.synchronize(device)
    finally:
        gc.collect()  # reference cycles
        torch.cuda.empty_cache()
    return torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)


def pool_pages(
    config: ServerConfig, *, token_bytes: int, most_useful_tokens: int, free_bytes: int, share: KvShare
) -> int:
    """Pages of the KV pool. An explicit size must fit; an automatic one is a `share` of free memory, at most
    `most_useful_tokens`.
    """
    page_bytes = token_bytes * config.page_size
    if config.kv_tokens is not None:
        asked, pages = "kv_tokens", pages_for(config.kv_tokens, config.page_size)
    elif config.kv_memory_gib is not None:
        asked, pages = "kv_memory_gib", int(config.kv_memory_gib * GIB) // page_bytes
    else:
        useful = pages_for(most_useful_tokens, config.page_size)
        budget = int(share.fraction * (free_bytes - share.left_bytes))
        asked, pages = "kv_memory_fraction", min(useful, budget // page_bytes)
    value = share.fraction if asked == "kv_memory_fraction" else getattr(config, asked)
    if pages < 1:
        raise StartupError(
            f"{asked} = {value} is less than one page: a page of {config.page_size} tokens takes {page_bytes} bytes"
        )
    if pages * page_bytes > free_bytes:
        raise StartupError(
            f"{asked} = {value} asks for a KV pool of {pages * page_bytes / GIB:.2f} GiB, "
            f"{free_bytes / GIB:.2f} GiB are free after weights, step memory and staging"
        )
    return pages
