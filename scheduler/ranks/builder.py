"""Builds the executor of a rank: weights, memory for steps, a KV cache in the rest, CUDA graphs."""

import logging
import threading
import time
from collections.abc import Callable

import torch

from ...common.arithmetic import ceil_div, round_up
from ...common.errors import StartupError
from ...common.sampling import SamplingParams
from ...configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from ...kernels.hisparse.slot_tables import table_bytes
from ...kernels.staging.kv_stage import warm_up_kv_stage
from ...memory.auto_settings import KvShare, auto_chunk_size, auto_kv_share, auto_running_requests
from ...memory.device import free_memory_bytes
from ...memory.hisparse.cache import HiSparseCache
from ...memory.hisparse.hot_buffer_size import resolve_hot_rows
from ...memory.kv_pool import KvCache
from ...memory.pages import pages_for
from ...memory.ring_memory import MAX_SHARE_BYTES, MIB, RING_TOKENS
from ...memory.sizing import GIB, check_weights_fit, peak_bytes
from ...models.grammar.compiler import GrammarCompiler
from ...models.layers.parallel import Parallel
from ...models.loading.catalog import ModelSource
from ...models.runner import ModelRunner, resolve_dtype
from ...models.sampling.sampler import TokenMasks
from ...models.weights.gguf import keeps_blocks
from ...transfer.plan.staged_regions import MAX_PART_BYTES
from ..messages.step import Draw, StepRow, tokens_of
from .cache_size import STAGED_RANKS, hisparse_pages, plain_pages, staging_bytes
from .executor import Executor
from .step_grammars import StepGrammars

log = logging.getLogger(__name__)

STEP_SETTING = {"prefill": "chunk_size", "decode": "max_running_requests"}
GRAPH_TOKENS, GRAPH_PROMPTS = 2048, 64
"""Largest prefill step that runs as a CUDA graph: tokens, prompts. In larger steps the GPU takes longer than the host
needs to launch the kernels, so a graph gains nothing.
"""
CPU_STEP_TOKENS, GPU_STEP_TOKENS = 256, 6144
"""Defaults of `max_step_tokens`."""


class RankBuilder:
    """Builds the executor of one rank. Raises StartupError for errors that the user can fix."""

    def __init__(self, config: AnyServerConfig, source: ModelSource, parallel: Parallel, device: torch.device) -> None:
        self._config = config
        self._source = source
        self._parallel = parallel
        self._device = device
        self._share = KvShare(0.0)
        """The share of free memory; known after the weights are loaded."""
        self.step_limit = self._choose_step_limit()
        """The largest step, in prompt tokens (prefill) or requests (decode)."""

    def build(self) -> Executor:
        config, source, parallel = self._config, self._source, self._parallel
        compiler = GrammarCompiler.of(source)
        reading = threading.Thread(target=compiler.read_vocabulary, name="vocabulary", daemon=True)
        if parallel.shard.samples:
            reading.start()  # here and not by the first grammar: llguidance holds the GIL for up to a second
        dtype = resolve_dtype(config.dtype, source.config, self._device)
        started = time.monotonic()
        keep_blocks = keeps_blocks(config.dtype, config.cpu_kernels, self._device)
        weight_bytes = ModelRunner.weight_bytes(
            source,
            dtype,
            parallel.shard,
            device=self._device,
            load_format=config.load_format,
            keep_blocks=keep_blocks,
        )
        check_weights_fit(weight_bytes, self._device, sharers=self._sharers)
        parallel.agree_minimum(0)  # a barrier: all ranks read the free memory before any of them loads
        log.info("loading %s (%s) from %s", source.name, source.config.architecture, source.path)
        runner = ModelRunner.load(
            source,
            device=self._device,
            dtype=dtype,
            parallel=parallel,
            load_format=config.load_format,
            kv_dtype=config.kv_dtype,
            index_dtype=config.index_dtype,
            cpu_kernels=config.cpu_kernels,
            keep_blocks=keep_blocks,
        )
        log.info("loaded in %.1f s: %s on %s", time.monotonic() - started, str(dtype)[6:], self._device)
        self._share = auto_kv_share(config, self._device, weight_bytes)
        step_bytes = self._measure_steps(runner)
        parallel.agree_minimum(0)  # a barrier: free memory is measured after all ranks have their weights
        if isinstance(config, DecodeConfig) and config.enable_hisparse:
            cache: KvCache = self._make_hisparse_cache(runner, config, step_bytes)
        else:
            cache = runner.make_cache(self._pool_pages(runner, step_bytes), config.page_size)
        log.info(
            "KV pool: %d tokens in %d pages of %d, %.2f GiB%s; %s = %d",
            cache.num_pages * config.page_size,
            cache.num_pages,
            config.page_size,
            cache.size_bytes / GIB,
            self._describe_share(),
            STEP_SETTING[config.role],
            self.step_limit,
        )
        if source.config.dsa is not None:
            *_, keys = cache.pools
            log.info("indexer keys: %s, %d bytes per token and layer", keys.dtype_name, sum(keys.plane_token_bytes))
        self._prepare_staging(runner, cache)
        started = time.monotonic()
        context = source.config.context_length
        if source.config.page_window is None:
            context = min(context, cache.num_pages * config.page_size)
        if self._capture_graphs(runner, cache, context):
            log.info("CUDA graphs captured in %.1f s", time.monotonic() - started)
        if self._device.type == "cuda":
            log.info(
                "memory of %s: %.2f GiB weights, %.2f GiB KV, %.2f GiB at most for a step and its graphs, "
                "%.2f GiB for staging; %.2f GiB are free",
                self._device,
                weight_bytes / GIB,
                cache.device_bytes / GIB,
                step_bytes / GIB,
                self._staging_bytes(runner) / GIB,
                free_memory_bytes(self._device) / GIB,
            )
        if parallel.shard.samples:
            reading.join()
        return Executor(
            runner,
            cache,
            source.config.eos_token_ids,
            overlap=uses_overlap(config),
            grammars=StepGrammars(compiler, self.step_limit, self._device),
        )

    def _choose_step_limit(self) -> int:
        config, model = self._config, self._source.config
        if isinstance(config, PrefillConfig):
            # data-parallel ranks compute their chunks at the same time, and experts for the tokens of all
            sharers = config.world_size // config.dp_size
            return auto_chunk_size(config, self._device, model.active_parameters // sharers)
        tables = 0
        if config.enable_hisparse and model.dsa is not None:
            groups, hot_rows = sum(model.dsa.indexed), resolve_hot_rows(config, model.dsa.index_topk)
            tables = table_bytes(
                groups=groups,
                requests=1,
                hot_rows=hot_rows,
                max_context=model.context_length,
                page_size=config.page_size,
            )
        return auto_running_requests(config, self._device, tables // config.pp)

    def _describe_share(self) -> str:
        """How the size of the pool was chosen, if it was automatic."""
        if self._config.kv_tokens is not None or self._config.kv_memory_gib is not None:
            return ""
        return f" ({self._share.fraction:g} of free memory, {self._share.reason})"

    def _make_hisparse_cache(self, runner: ModelRunner, config: DecodeConfig, step_bytes: int) -> HiSparseCache:
        size = hisparse_pages(
            config,
            runner,
            step_limit=self.step_limit,
            host_bytes=free_memory_bytes(torch.device("cpu")) // len(config.local_ranks),
            free_bytes=self._free_bytes() - step_bytes,
            share=self._share,
        )
        dsa, context = self._source.config.dsa, self._source.config.context_length
        assert dsa is not None, "checked by hisparse_pages"
        hot_rows = resolve_hot_rows(config, dsa.index_topk)
        num_pages = self._parallel.agree_minimum(size.num_pages)
        hot_pages = self._parallel.agree_minimum(size.hot_pages)
        cache = runner.make_hisparse_cache(
            num_pages,
            config.page_size,
            hot_pages=hot_pages,
            slots=self.step_limit,
            hot_rows=hot_rows,
            max_context=min(context, num_pages * config.page_size),
        )
        log.info(
            "HiSparse: %d hot pages of %d rows, and up to %d more, lent by the index pool in units of %d; %d rows per "
            "hot buffer",
            hot_pages,
            config.page_size,
            cache.overlay.count * cache.overlay.hot_pages,
            cache.overlay.hot_pages,
            hot_rows,
        )
        return cache

    def _pool_pages(self, runner: ModelRunner, step_bytes: int) -> int:
        """Pages of the pool. The number is the same on every rank: ranks of one scheduler share page ids, and peers
        expect data-parallel ranks to be equal.
        """
        pages = plain_pages(
            self._config,
            runner,
            step_limit=self.step_limit,
            free_bytes=self._free_bytes() - step_bytes,
            share=self._share,
        )
        return self._parallel.agree_minimum(pages)

    def _staging_bytes(self, runner: ModelRunner) -> int:
        return staging_bytes(self._config, self._source.config, runner.kv_token_bytes)

    def _prepare_staging(self, runner: ModelRunner, cache: KvCache) -> None:
        """Log the memory of staging, and compile the gather kernel of prefill: its PartWriters are created at pairing,
        shortly before requests. On decode the PartScatterer compiles its own.
        """
        size = self._staging_bytes(runner)
        if not size:
            return
        if isinstance(self._config, DecodeConfig):
            log.info(
                "staging ring: %.1f MiB (staging_ring_mib; by default twice the KV of %d tokens, at most %d MiB)",
                size / MIB,
                RING_TOKENS,
                2 * MAX_SHARE_BYTES // MIB,
            )
        else:
            log.info(
                "staging buffers: up to %.1f MiB (for each of %d decode ranks two parts of %d tokens, at most %d MiB "
                "each), allocated when a decode server that divides KV heads differently is paired",
                size / MIB,
                STAGED_RANKS,
                RING_TOKENS,
                MAX_PART_BYTES // MIB,
            )
            warm_up_kv_stage(cache.pools[0].data)

    @property
    def _sharers(self) -> int:
        """Ranks of this machine that share the memory of this rank, including itself."""
        shared = self._device.type == "cpu" or self._config.ranks_share_gpu
        return len(self._config.local_ranks) if shared else 1

    def _free_bytes(self) -> int:
        """This rank's share of the free memory. Every caller agrees on a size with the other ranks afterwards, so all
        ranks read the free memory before any of them allocates.
        """
        return free_memory_bytes(self._device) // self._sharers

    def _capture_graphs(self, runner: ModelRunner, cache: KvCache, context: int) -> bool:
        """Capture CUDA graphs for steps over `cache`, of sequences up to `context` tokens. False if they are off or not
        available.
        """
        if not (self._config.cuda_graphs and self._device.type == "cuda"):
            return False
        if isinstance(self._config, PrefillConfig):
            tokens = min(self.step_limit, GRAPH_TOKENS)
            chunks = runner.capture_chunk_graphs(
                cache, max_tokens=tokens, max_slices=min(tokens, GRAPH_PROMPTS), max_context=context
            )
            return chunks is not None
        captured = runner.capture_graphs(cache, max_batch=self.step_limit, max_context=context) is not None
        if captured and computes_prompts(self._config):
            runner.capture_chunk_graphs(
                cache,
                max_tokens=max(
                    min(step_tokens(self._config, on_gpu=True), GRAPH_TOKENS), self.step_limit + self._config.page_size
                ),
                max_slices=self.step_limit + GRAPH_PROMPTS,
                max_context=context,
                decode_rows=True,
            )
        return captured

    def _measure_steps(self, runner: ModelRunner) -> int:
        """Device memory that steps need beside weights and KV, measured by running the largest ones. This also compiles
        kernels, so that the first request does not wait for them.
        """
        if self._device.type != "cuda":
            return 0
        started = time.monotonic()
        config = self._config
        longest = self._source.config.context_length
        if isinstance(config, PrefillConfig):
            longest = min(longest, self._pool_pages(runner, 0) * config.page_size)
        try:
            needed = peak_bytes(self._device, lambda: self._dry_run(runner, longest))
        except torch.OutOfMemoryError as error:
            raise StartupError(
                f"{STEP_SETTING[config.role]} = {self.step_limit}: {self._device} has not enough memory for such a "
                f"step in addition to the weights: {error}"
            ) from error
        log.info("steps measured in %.1f s: %.2f GiB at most", time.monotonic() - started, needed / GIB)
        return needed

    def _dry_run(self, runner: ModelRunner, longest: int) -> None:
        """Run all trial steps, over a cache of a single page that stands for all others."""
        config = self._config
        cache = runner.make_cache(1, config.page_size)
        self._capture_graphs(runner, cache, longest)
        executor = Executor(runner, cache, self._source.config.eos_token_ids)
        on_gpu, unpacked = self._device.type == "cuda", runner.most_unpacked_rows
        for rows in trial_steps(config, self.step_limit, longest, on_gpu=on_gpu, unpacked_rows=unpacked):
            same = (tokens_of(rows),) * self._config.dp_size if self._config.dp_size > 1 else None
            executor.start(rows, same).finish()
        vocabulary = runner.config.vocab_size
        every = torch.full((1, ceil_div(vocabulary, 32)), -1, dtype=torch.int32, device=self._device)
        TokenMasks([0], every).apply(torch.zeros(1, vocabulary, device=self._device), [0])  # compiles the kernel
        runner.release_graphs()


def trial_steps(
    config: AnyServerConfig,
    step_limit: int,
    longest: int,
    *,
    on_gpu: bool = True,
    unpacked_rows: Callable[[int], int] = lambda _tokens: 0,
) -> list[list[StepRow]]:
    """The steps that need most memory or special kernels.

    Decode: the largest batch; a single token; and, if it computes prompts, a chunk at the end of a prompt of `longest`
    tokens, with the batch and alone. Prefill: such a chunk; and chunks of several prompts, up to the largest number.

    Both: chunks whose sequences together have `unpacked_rows(tokens)` rows, the most that a step of that many tokens
    unpacks. A step with more rows unpacks none, so it needs less memory.
    """
    sampling = SamplingParams(temperature=1.0, top_p=0.99)  # needs most memory

    def row(start: int, tokens: int) -> StepRow:
        pages = [0] * pages_for(start + tokens, config.page_size)
        return StepRow([0] * tokens, start, pages, draws=(Draw(sampling, 0),))

    def unpacking(tokens: int) -> list[list[StepRow]]:
        rows = unpacked_rows(tokens) // config.page_size * config.page_size
        count = ceil_div(rows, longest)
        if count == 0 or tokens < count or rows // count <= tokens // count:
            return []
        return [[row(rows // count - tokens // count, tokens // count)] * count]

    if isinstance(config, DecodeConfig):
        running, one = [row(0, 1)] * step_limit, [row(0, 1)]
        if not computes_prompts(config):
            return [running, one]
        tokens = step_tokens(config, on_gpu=on_gpu)
        chunks = [min(longest, count) for count in (max(config.page_size, tokens - step_limit), tokens)]
        beside, alone = (row(longest - chunk, chunk) for chunk in chunks)
        return [running, one, [*running, beside], [alone], *unpacking(chunks[1])]
    chunk = min(step_limit, longest)
    most = min(chunk, config.max_queued_requests)
    counts = sorted({*(1 << power for power in range(most.bit_length())), most})
    of_prompts = ([row(0, chunk // count)] * count for count in counts)
    return [[row(longest - chunk, chunk)], *of_prompts, *unpacking(chunk)]


def computes_prompts(config: DecodeConfig) -> bool:
    """Whether a decode server may compute prompts itself."""
    return config.local_prefill != "never"


def step_tokens(config: DecodeConfig, *, on_gpu: bool) -> int:
    """Most tokens of a step of a decode server that computes prompts, rounded up to whole pages."""
    return round_up(config.max_step_tokens or (GPU_STEP_TOKENS if on_gpu else CPU_STEP_TOKENS), config.page_size)


def uses_overlap(config: AnyServerConfig) -> bool:
    """Whether overlap scheduling is on: with one pipeline stage, whose device has the last sampled tokens."""
    return isinstance(config, DecodeConfig) and config.pp == 1
