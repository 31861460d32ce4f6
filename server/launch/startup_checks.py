"""Refuses settings that do not fit the model, the machine or each other, before anything starts.

The checks need only the model's config.json or GGUF header: no process, no torch, no weights. Ranks find the same
problems with the same functions, but minutes later.
"""

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from ...common.errors import StartupError
from ...configs.schema import AnyServerConfig, DecodeConfig, ServerConfig
from ...memory.hisparse.hot_buffer_size import resolve_hot_rows
from ...models.config.model import ModelConfig
from ...models.config.sharding import Shard
from ...models.loading.catalog import ModelSource
from ...transfer.mooncake.library import NOT_INSTALLED
from ...transfer.mooncake.transports import resolve_transport

Check = Callable[[AnyServerConfig, ModelSource], Iterator[str]]
"""Yields a line for each problem."""

GIB = 1 << 30
MIB = 1 << 20
MAX_RANKS = 64
RING_ROUND_BYTES = 4096
"""The size of a staging ring is rounded up to a multiple of this (memory/ring_memory.py)."""


def check_startup(config: AnyServerConfig, source: ModelSource) -> None:
    """Raises StartupError with a line for each problem. Reads only the model's configuration."""
    _check_all((_tensor_parallel, _pipeline, _hisparse, _kv_memory, _transport, _mooncake), config, source)


def check_layout(config: AnyServerConfig, source: ModelSource) -> None:
    """Raises StartupError if the model cannot be divided over tp and pp ranks; the message lists the values of tp that
    fit.
    """
    _check_all((_tensor_parallel, _pipeline), config, source)


def _check_all(checks: Iterable[Check], config: AnyServerConfig, source: ModelSource) -> None:
    problems = [problem for check in checks for problem in check(config, source)]
    if problems:
        raise StartupError("\n".join(problems))


def _tensor_parallel(config: ServerConfig, source: ModelSource) -> Iterator[str]:
    def problem_with(tp: int) -> str | None:
        shard = Shard(tp_size=tp, whole_experts=config.whole_experts, dp_attention=config.dp_attention)
        return _problem_of(lambda: source.config.check_shares(shard))

    if (problem := problem_with(config.tp)) is not None:
        fitting = [tp for tp in range(1, MAX_RANKS + 1) if problem_with(tp) is None]
        yield f"{problem}: {_choices('tp', fitting)}" if fitting else problem


def _pipeline(config: ServerConfig, source: ModelSource) -> Iterator[str]:
    if (problem := _problem_of(lambda: source.config.stage_layers(Shard(stages=config.pp)))) is not None:
        yield problem


_READS_ALL = ", which reads the rows of all tokens in every step: host memory is too slow for that"


def _hisparse(config: ServerConfig, source: ModelSource) -> Iterator[str]:
    dsa, latent = source.config.dsa, source.config.mla is not None
    if dsa is None and latent and config.kv_dtype == "fp8_e4m3":
        yield f"kv_dtype fp8_e4m3 is not supported for {source.config.architecture} ({source.name}): use auto"
    if dsa is not None and config.kv_dtype == "fp8_e4m3" and dsa.kv_rank % 4:
        yield f"kv_dtype fp8_e4m3 needs a kv_lora_rank that is a multiple of 4, and {source.name} has {dsa.kv_rank}"
    if dsa is not None and config.index_dtype == "fp8_e4m3" and dsa.index_dim % 4:
        yield (
            f"index_dtype fp8_e4m3 needs an index_head_dim that is a multiple of 4, and {source.name} has "
            f"{dsa.index_dim}"
        )
    if not isinstance(config, DecodeConfig) or not config.enable_hisparse:
        return
    if dsa is None:
        yield (
            "enable_hisparse needs a model with sparse attention (deepseek_v32, glm_moe_dsa), and "
            f"{source.name} is {source.config.architecture}{_READS_ALL if latent else ''}"
        )
    elif (problem := _problem_of(lambda: resolve_hot_rows(config, dsa.index_topk))) is not None:
        yield problem


def _kv_memory(config: ServerConfig, source: ModelSource) -> Iterator[str]:
    token_bytes = _least_token_bytes(config, source.config)
    page_bytes = token_bytes * config.page_size
    if config.kv_memory_gib is not None and config.kv_memory_gib * GIB < page_bytes:
        yield (
            f"kv_memory_gib = {config.kv_memory_gib} is less than one page: a page of {config.page_size} tokens takes "
            f"{page_bytes} bytes or more"
        )
    ring_mib = config.staging_ring_mib if isinstance(config, DecodeConfig) else None
    if ring_mib is not None and ring_mib * MIB + RING_ROUND_BYTES <= token_bytes:
        yield f"staging_ring_mib = {ring_mib} is less than one token, which takes {token_bytes} bytes or more"


def _least_token_bytes(config: ServerConfig, model: ModelConfig) -> int:
    """Bytes of KV per token on the rank with the fewest heads and layers: a lower bound for all. 0 if unknown."""
    shard = Shard(
        tp_size=config.tp,
        stages=config.pp,
        stage=config.pp - 1,
        whole_experts=config.whole_experts,
        dp_attention=config.dp_attention,
    )
    attempts = (lambda: model.check_shares(shard), lambda: model.stage_layers(shard))
    if model.mla is not None or any(_problem_of(attempt) is not None for attempt in attempts):
        return 0
    in_32_bits = config.dtype == "float32" or (config.dtype == "auto" and config.device == "cpu")
    value_bytes = 1 if config.kv_dtype == "fp8_e4m3" else 4 if in_32_bits else 2
    heads, layers = shard.attention.kv_heads(model.num_kv_heads), model.stage_layers(shard)
    return 2 * len(layers) * len(heads) * model.head_dim * value_bytes


def _transport(config: ServerConfig, _: ModelSource) -> Iterator[str]:
    if config.transport == "nvlink" and config.device == "cpu":
        yield "transport nvlink moves KV between GPUs, and device is cpu: use --transport tcp"
    for local_rank in range(len(config.local_ranks)):
        if (problem := _problem_of(partial(resolve_transport, config, local_rank))) is not None:
            yield problem
            return


def _mooncake(_config: ServerConfig, _source: ModelSource) -> Iterator[str]:
    if importlib.util.find_spec("mooncake") is None:
        yield NOT_INSTALLED


def _problem_of(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except StartupError as error:
        return str(error)
    return None


def _choices(setting: str, values: list[int]) -> str:
    *others, last = map(str, values)
    return f"--{setting} may be {', '.join(others)} or {last}" if others else f"--{setting} may be {last}"
