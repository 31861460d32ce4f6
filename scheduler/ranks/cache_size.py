"""Pages of a rank's KV cache, from the configuration, the model and free memory.

A rank calls these functions with the memory that it has measured (builder.py). `pdserve plan` calls them with the
memory of a GPU that may not be present (server/plan/sizes.py).
"""

from ...configs.schema import AnyServerConfig, DecodeConfig
from ...memory.auto_settings import KvShare
from ...memory.hisparse.hot_buffer_size import resolve_hot_rows
from ...memory.hisparse.sizing import HiSparseSize, hisparse_size
from ...memory.ring_memory import RING_TOKENS, may_stage, ring_bytes
from ...memory.sizing import pool_pages
from ...models.config.model import ModelConfig
from ...models.runner import ModelRunner
from ...transfer.data.part_writer import gather_bytes
from ...transfer.plan.staged_regions import MAX_PART_BYTES

PREFILL_POOL_CONTEXTS = 8
"""An automatic prefill pool holds this many prompts of full length: more are never in use at once."""
STAGED_RANKS = 8
"""Decode ranks for which a prefill rank keeps memory to gather staged parts; for more ranks it allocates on demand."""


def staging_bytes(config: AnyServerConfig, model: ModelConfig, token_bytes: int) -> int:
    """Memory of staged transfers beside the pool: the ring on decode, gather buffers on prefill. 0 if the KV has no
    heads to distribute.
    """
    if model.mla is not None or not may_stage(config, model.num_kv_heads):
        return 0
    if isinstance(config, DecodeConfig):
        return ring_bytes(config, token_bytes)
    # a ring of the default size takes parts of at most RING_TOKENS tokens
    return STAGED_RANKS * gather_bytes(min(RING_TOKENS * token_bytes, MAX_PART_BYTES))


def plain_pages(
    config: AnyServerConfig, runner: ModelRunner, *, step_limit: int, free_bytes: int, share: KvShare
) -> int:
    """Pages of a cache on the device. `free_bytes` are free beside weights and steps. Raises StartupError."""
    concurrent = step_limit if isinstance(config, DecodeConfig) else PREFILL_POOL_CONTEXTS
    return pool_pages(
        config,
        token_bytes=runner.kv_token_bytes,
        most_useful_tokens=runner.config.context_length * concurrent,
        free_bytes=free_bytes - staging_bytes(config, runner.config, runner.kv_token_bytes),
        share=share,
    )


def hisparse_pages(
    config: DecodeConfig, runner: ModelRunner, *, step_limit: int, host_bytes: int, free_bytes: int, share: KvShare
) -> HiSparseSize:
    """Pages of a HiSparse cache for `step_limit` running requests. Raises StartupError."""
    dsa = runner.config.dsa
    assert dsa is not None, "checked by the frontend (server/launch/startup_checks.py)"
    latent, keys = runner.make_cache(1, 1).pools
    return hisparse_size(
        config,
        latent_token_bytes=latent.size_bytes,
        indexer_token_bytes=keys.size_bytes,
        hot_rows=resolve_hot_rows(config, dsa.index_topk),
        index_groups=keys.num_layers,
        context_length=runner.config.context_length,
        slots=step_limit,
        host_bytes=host_bytes,
        device_bytes=free_bytes,
        share=share,
    )
