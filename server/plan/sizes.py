"""What a decode server needs and holds on GPUs that are not here: weights, KV, requests.

Every size is read off the classes that a server allocates, on torch's meta device, and page counts come from the
functions that a server calls (scheduler/ranks/cache_size.py). Only free memory is assumed instead of measured.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...common.errors import StartupError
from ...configs.schema import DecodeConfig
from ...configs.setting_types import IndexDtypeSetting, KvDtypeSetting
from ...kernels.hisparse.slot_tables import buffer_pages
from ...memory.auto_settings import ALONE_KV_FRACTION, KvShare
from ...memory.hisparse.cache import HiSparseCache
from ...memory.hisparse.hot_buffer_size import resolve_hot_rows
from ...memory.kv_pool import KvCache
from ...memory.pages import pages_for
from ...models.config.sharding import Shard
from ...models.loading.catalog import ModelSource
from ...models.loading.weights import usual_format
from ...models.runner import ModelRunner, fp8_index, resolve_dtype
from ...scheduler.ranks.cache_size import hisparse_pages, plain_pages

MOST_REQUESTS = 4096
"""The limit of `max_running_requests`."""
UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decode server with or without HiSparse. Bytes and pages are those of its largest rank. `requests`
    of the planned context run at once on the server; with data-parallel attention, `requests_per_rank` on each rank.
    """

    hisparse: bool
    weight_bytes: int
    device_token_bytes: int  # KV of one token on the GPU
    host_token_bytes: int
    device_request_bytes: int  # KV of one request on the GPU: its tokens, or with HiSparse keys, hot buffer and tables
    requests: int
    requests_per_rank: int  # those whose KV, or part of it, one rank holds
    limit: str  # of `requests`: weights, GPU memory, host memory or a setting
    max_running_requests: int  # the setting with which `requests` fit; with data-parallel attention, of each rank
    num_pages: int
    own_hot_pages: int  # pages of hot rows that do not overlap keys; 0 without HiSparse
    device_kv_bytes: int  # allocated at start
    host_kv_bytes: int
    host_request_bytes: int  # of host_kv_bytes, what `requests_per_rank` use


@dataclass(frozen=True)
class _Pages:
    num_pages: int
    own_hot_pages: int = 0


class Plan:
    """Plans the decode server of `config`. `stages` has one rank of each pipeline stage. If `max_running_requests` is
    not set, the largest number that fits is planned.
    """

    def __init__(self, config: DecodeConfig, stages: list[ModelRunner], *, context: int, device_bytes: int) -> None:
        """`device_bytes`: memory of a GPU that weights and KV may use."""
        self._config, self._stages, self._context = config, stages, context
        self._device_bytes = device_bytes
        self._model = stages[0].config
        self._weight_bytes = max(_weight_bytes(runner) for runner in stages)

    def sizes(self) -> Sizes:
        requests = self._fitting(self._config)
        slots = self._config.max_running_requests or max(1, requests)
        pages = self._pages(self._config, slots) if requests else None
        caches = [self._cache(runner, pages, slots) for runner in self._stages] if pages else []
        hosts = [cache.host if isinstance(cache, HiSparseCache) else None for cache in caches]
        tokens = [self._token_bytes(runner) for runner in self._stages]
        request_pages = pages_for(self._context, self._config.page_size)
        return Sizes(
            hisparse=self._config.enable_hisparse,
            weight_bytes=self._weight_bytes,
            device_token_bytes=max(device for device, _ in tokens),
            host_token_bytes=max(host for _, host in tokens),
            device_request_bytes=max(self._request_bytes(runner) for runner in self._stages),
            requests=requests * self._config.dp_size,
            requests_per_rank=requests,
            limit=self._limit(requests),
            max_running_requests=slots,
            num_pages=pages.num_pages if pages else 0,
            own_hot_pages=pages.own_hot_pages if pages else 0,
            device_kv_bytes=max((cache.device_bytes for cache in caches), default=0),
            host_kv_bytes=max((host.size_bytes for host in hosts if host is not None), default=0),
            host_request_bytes=max(
                (requests * request_pages * host.page_bytes for host in hosts if host is not None), default=0
            ),
        )

    def _limit(self, requests: int) -> str:
        if self._weight_bytes >= self._device_bytes:
            return "weights"
        if requests == (self._config.max_running_requests or MOST_REQUESTS):
            return "max_running_requests"
        more_host_memory = self._config.model_copy(update={"host_memory_gib": None})
        return "host memory" if requests < self._fitting(more_host_memory) else "GPU memory"

    def _fitting(self, config: DecodeConfig) -> int:
        """The most requests that run at once on a rank: each has its pages and, with HiSparse, a hot buffer."""
        if config.max_running_requests is not None:
            return self._running(config, config.max_running_requests)
        return _largest(lambda slots: self._running(config, slots) >= slots, MOST_REQUESTS)

    def _running(self, config: DecodeConfig, slots: int) -> int:
        """Requests that run at once on a rank that is sized for `slots`."""
        try:
            pages = self._pages(config, slots)
        except StartupError:  # too little memory
            return 0
        running = min(slots, pages.num_pages // pages_for(self._context, config.page_size))
        if config.enable_hisparse:
            running = min(running, pages.own_hot_pages // self._buffer_pages)
        return running

    def _pages(self, config: DecodeConfig, slots: int) -> _Pages:
        """Page counts that all ranks agree on. Raises StartupError if memory is too small."""
        share = KvShare(config.kv_memory_fraction or ALONE_KV_FRACTION)
        found = []
        for runner in self._stages:
            free = self._device_bytes - _weight_bytes(runner)
            if config.enable_hisparse:
                size = hisparse_pages(
                    config, runner, step_limit=slots, host_bytes=UNLIMITED_BYTES, free_bytes=free, share=share
                )
                found.append(_Pages(size.num_pages, size.hot_pages))
            else:
                found.append(_Pages(plain_pages(config, runner, step_limit=slots, free_bytes=free, share=share)))
        return _Pages(min(pages.num_pages for pages in found), min(pages.own_hot_pages for pages in found))

    def _cache(self, runner: ModelRunner, pages: _Pages, slots: int) -> KvCache:
        """The cache of a rank, as its builder makes it."""
        config = self._config
        if not config.enable_hisparse:
            return runner.make_cache(pages.num_pages, config.page_size)
        return runner.make_hisparse_cache(
            pages.num_pages,
            config.page_size,
            hot_pages=pages.own_hot_pages,
            slots=slots,
            hot_rows=self._hot_rows,
            max_context=min(self._model.context_length, pages.num_pages * config.page_size),
        )

    def _token_bytes(self, runner: ModelRunner) -> tuple[int, int]:
        """KV of one token on the GPU and in host memory."""
        if not self._config.enable_hisparse:
            return runner.kv_token_bytes, 0
        latent, keys = runner.make_cache(1, 1).pools
        return keys.size_bytes, latent.size_bytes

    def _request_bytes(self, runner: ModelRunner) -> int:
        """GPU memory that one more request takes."""
        pages = pages_for(self._context, self._config.page_size)
        if not self._config.enable_hisparse:
            return runner.make_cache(pages, self._config.page_size).device_bytes
        # compare caches that hold a whole context: the tables of a smaller one would be shorter
        least = pages_for(self._model.context_length, self._config.page_size)
        before, after = (
            self._cache(runner, _Pages(least + extra * pages, (1 + extra) * self._buffer_pages), 1 + extra).device_bytes
            for extra in (0, 1)
        )
        return after - before

    @property
    def _hot_rows(self) -> int:
        dsa = self._model.dsa
        assert dsa is not None, "checked by plan_sizes"
        return resolve_hot_rows(self._config, dsa.index_topk)

    @property
    def _buffer_pages(self) -> int:
        return buffer_pages(self._hot_rows, self._config.page_size)


def plan_sizes(
    config: DecodeConfig, source: ModelSource, *, context: int, device_bytes: int, fp8: bool, hisparse: bool | None
) -> list[Sizes]:
    """Returns the sizes of the server with or without HiSparse; if `hisparse` is None, without and, for a model with
    sparse attention, with it. `fp8`: whether the GPU has fp8.

    Raises StartupError if the model cannot be divided over the ranks, lacks the sparse attention that HiSparse needs,
    or does not support the context.
    """
    model = source.config
    if context > model.context_length:
        raise StartupError(f"context = {context} is more than the {model.context_length} tokens of {source.name}")
    if hisparse and model.dsa is None:
        raise StartupError(
            f"enable_hisparse needs a model with sparse attention, and {source.name} is {model.architecture}"
        )
    dtype = resolve_dtype(config.dtype, model, torch.device("cuda"))
    stages = []
    for stage in range(config.pp):
        shard = Shard(
            tp_size=config.tp,
            stage=stage,
            stages=config.pp,
            whole_experts=config.whole_experts,
            dp_attention=config.dp_size > 1,
        )
        model.check_shares(shard)
        stages.append(_outline(source, shard, dtype, config.kv_dtype, config.index_dtype, fp8))
    both = (False, True) if model.dsa is not None else (False,)
    return [
        Plan(
            config.model_copy(update={"enable_hisparse": variant}), stages, context=context, device_bytes=device_bytes
        ).sizes()
        for variant in (both if hisparse is None else (hisparse,))
    ]


@functools.lru_cache(maxsize=16)
def _outline(
    source: ModelSource,
    shard: Shard,
    dtype: torch.dtype,
    kv_dtype: KvDtypeSetting,
    index_dtype: IndexDtypeSetting,
    fp8: bool,
) -> ModelRunner:
    """Builds a rank on the meta device. Cached, because a model of many experts has tens of thousands of tensors."""
    dsa, stored = source.config.dsa, usual_format(source.config)
    return ModelRunner.outline(
        source.config,
        shard,
        dtype=dtype,
        kv_dtype=kv_dtype,
        stored=stored if stored is not None and (fp8 or not stored.needs_fp8) else None,
        fp8_index=dsa is not None and fp8_index(index_dtype, dtype, dsa.index_dim, has_fp8=fp8),
    )


@functools.lru_cache(maxsize=16)
def _weight_bytes(runner: ModelRunner) -> int:
    return runner.held_weight_bytes


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` such that `holds` is true from 1 to it; 0 if it is false for 1."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
