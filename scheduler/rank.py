"""One rank at work: its part of the model, its KV, its side of the transfers, driven by the leader's commands.

build     weights -> KV cache -> CUDA graphs -> transfer engines -> RankReady
serve     commands in order; steps may overlap: the results of one are read while the next one runs
transfer  commands about KV that is complete do not wait in that line
"""

import collections
import logging
import os
import queue
import time
from collections.abc import Callable

import torch

from ..configs.errors import StartupError
from ..configs.sampling import SamplingParams
from ..configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from ..memory.device import free_memory_bytes, resolve_device
from ..memory.kv_pool import KvCache, KvPool
from ..memory.sizing import GIB, check_weights_fit, peak_bytes, pool_pages
from ..models.catalog import ModelSource
from ..models.parallel import Backend, Parallel
from ..models.runner import ModelRunner, resolve_dtype
from ..models.sharding import Shard
from ..transfer.checksum import add_sums, block_sum
from ..transfer.chunk_writer import ChunkWriter, LocalPool
from ..transfer.layout import KvLayout, Plane
from ..transfer.messages import Pool, Rank
from ..transfer.receivers import Receivers
from ..transfer.transports import machine_id
from .effects import CancelChunks, CopyPage, DropPages, LoadPages, SavePages
from .executor import Executor, PendingStep
from .rank_messages import (
    ChunkReport,
    ClosePeer,
    ComputeCommand,
    KvVerified,
    OpenPeer,
    OrderDone,
    PageCommand,
    RankReady,
    RankReport,
    RunStep,
    StepDone,
    StopRank,
    TransferCommand,
    VerifyKv,
    WriteChunk,
)
from .step import Draw, StepRow

log = logging.getLogger(__name__)

PREFILL_POOL_CONTEXTS = 8
"""An automatic prefill pool holds this many prompts of full length: more would never be used at once."""
COLLECTIVE_TIMEOUT_S = 600.0
"""Longest wait of a rank for the others. Lost ones are noticed by their silence, long before."""
STEPS_AHEAD = 2
"""Steps started on the device whose results have not been read."""


class RankEngine:
    """Everything of one rank. Built, run and closed on one thread; `report` must be callable from any."""

    def __init__(
        self,
        config: AnyServerConfig,
        source: ModelSource,
        rank: int,
        *,
        meet_at: tuple[str, int] | None,
        report: Callable[[RankReport], None],
    ) -> None:
        """`meet_at` is where the ranks of this server find each other; None for the only one. Raises StartupError."""
        self._config = config
        self._source = source
        self._report = report
        self._rank = rank
        local = rank - config.local_ranks.start
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        elif len(config.local_ranks) > 1:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // len(config.local_ranks)))
        self._device = resolve_device(config.device, local)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._parallel = _meet(config, rank, self._device, meet_at)
        self._executor = self._build()
        self._pools = [LocalPool(pool, _layout(pool)) for pool in self._executor.cache.pools]
        self._receivers: Receivers | None = None
        self._writer: ChunkWriter | None = None
        match config:
            case DecodeConfig():
                self._receivers = Receivers(config, self._pools, local_rank=local)
            case PrefillConfig():
                self._writer = ChunkWriter(
                    rank,
                    self._pools,
                    config,
                    local_rank=local,
                    on_written=lambda written: report(ChunkReport(rank, written)),
                )
        self._pending: collections.deque[tuple[int, PendingStep]] = collections.deque()
        self._stepping_s = 0.0
        self._saved: dict[str, list[torch.Tensor]] = {}
        """KV of retracted requests, in host memory."""

    def announce(self) -> None:
        """Report that commands may come."""
        self._report(self._ready())

    def problems(self) -> tuple[str, ...]:
        """What is wrong with this rank's transfers. May be called from another thread."""
        return tuple(self._writer.problems()) if self._writer is not None else ()

    @property
    def busy_s(self) -> float:
        """Time spent on steps, less that spent waiting for the stage before. May be read from another thread."""
        return self._stepping_s - self._parallel.waited_s

    def serve(self, commands: "queue.SimpleQueue[ComputeCommand]") -> None:
        """Carry out commands until StopRank."""
        while True:
            if self._pending and (commands.empty() or len(self._pending) >= STEPS_AHEAD):
                self._finish_step()
                continue
            command = commands.get()
            if isinstance(command, StopRank):
                return
            self._carry_out(command)

    def transfer(self, command: TransferCommand) -> None:
        """Carry out a command that concerns KV which is complete. Called from another thread; does not wait."""
        assert self._writer is not None, "only prefill ranks write chunks"
        match command:
            case WriteChunk(chunk=chunk):
                self._writer.write(chunk)
            case CancelChunks(instance=instance, key=key):
                self._writer.cancel(instance, key)
            case OpenPeer(hello=hello, welcome=welcome):
                self._writer.open(hello, welcome)
            case ClosePeer(instance=instance):
                self._writer.close(instance)

    def close(self) -> None:
        """Let go of the other ranks and of all memory that peers could write."""
        if self._writer is not None:
            self._writer.close_all()
        if self._receivers is not None:
            self._receivers.close()
        self._parallel.close()

    def _carry_out(self, command: ComputeCommand) -> None:
        match command:
            case RunStep():
                self._start_step(command)
            case CopyPage() | SavePages() | LoadPages() | DropPages():
                self._move_pages(command)
            case VerifyKv():
                self._report(KvVerified(self._rank, command.key, *self._verify(command)))
            case _:
                raise TypeError(f"unexpected command: {command!r}")

    # -- steps and pages ---------------------------------------------------------------------------------------

    def _start_step(self, command: RunStep) -> None:
        """A lone rank survives a step that fails; of several, the others would wait for it for ever."""
        started = time.monotonic()
        try:
            self._pending.append((command.order, self._executor.start(command.rows)))
        except Exception as error:
            if self._parallel.shard.world_size > 1:
                raise
            self._step_failed(command.order, error)
        self._stepping_s += time.monotonic() - started

    def _finish_step(self) -> None:
        order, step = self._pending.popleft()
        started = time.monotonic()
        try:
            results = step.finish()
        except Exception as error:
            if self._parallel.shard.world_size > 1:
                raise
            self._step_failed(order, error)
            return
        self._stepping_s += time.monotonic() - started
        if results is not None:
            self._report(StepDone(self._rank, order, tuple(results)))

    def _step_failed(self, order: int, error: Exception) -> None:
        while self._pending:  # reports are in order
            self._finish_step()
        log.exception("step %d failed", order, exc_info=error)
        self._report(StepDone(self._rank, order, (), f"{type(error).__name__}: {error}"))

    def _move_pages(self, command: PageCommand) -> None:
        """Done when it is reported: peers may write the pages then."""
        while self._pending:
            self._finish_step()
        started = time.monotonic()
        cache = self._executor.cache
        match command:
            case CopyPage(source=source, destination=destination):
                cache.copy_page(source, destination)
            case SavePages(rid=rid, pages=pages):
                self._saved[rid] = cache.save(pages)
            case LoadPages(rid=rid, pages=pages):
                cache.load(self._saved.pop(rid), pages)
            case DropPages(rid=rid):
                del self._saved[rid]
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._report(OrderDone(self._rank, command.order, time.monotonic() - started))

    def _verify(self, command: VerifyKv) -> tuple[int, str | None]:
        """Chunks compared, and the first difference from what was sent."""
        for count, chunk in enumerate(command.chunks):
            span = f"tokens [{chunk.token_start}, {chunk.token_end})"
            if len(chunk.checksums) <= self._rank:
                return count, f"prefill sent no checksum for {span}"
            found = add_sums(
                block_sum(pool.memory.read_tokens(command.pages, chunk.token_start, chunk.token_end), pool.layout)
                for pool in self._pools
            )
            if found != chunk.checksums[self._rank]:
                return count, f"KV checksum differs for {span} on rank {self._rank}"
        return len(command.chunks), None

    # -- building ----------------------------------------------------------------------------------------------

    def _build(self) -> Executor:
        config, source, parallel = self._config, self._source, self._parallel
        dtype = resolve_dtype(config.dtype, source.config, self._device)
        started = time.monotonic()
        weight_bytes = ModelRunner.weight_bytes(source, dtype, parallel.shard)
        check_weights_fit(weight_bytes, self._device)
        log.info("loading %s (%s) from %s", source.name, source.config.architecture, source.path)
        runner = ModelRunner.load(
            source, device=self._device, dtype=dtype, parallel=parallel, load_format=config.load_format
        )
        log.info("loaded in %.1f s: %s on %s", time.monotonic() - started, str(dtype)[6:], self._device)
        step_bytes = self._measure_steps(runner)
        pages = self._pool_pages(runner, step_bytes)
        cache = runner.make_cache(pages, config.page_size)
        log.info(
            "KV pool: %d tokens in %d pages of %d, %.2f GiB",
            pages * config.page_size,
            pages,
            config.page_size,
            cache.size_bytes / GIB,
        )
        started = time.monotonic()
        if self._capture_graphs(runner, cache):
            log.info("CUDA graphs captured in %.1f s", time.monotonic() - started)
        if self._device.type == "cuda":
            log.info(
                "memory of %s: %.2f GiB weights, %.2f GiB KV pool, %.2f GiB at most for a step and its graphs; "
                "%.2f GiB are free",
                self._device,
                weight_bytes / GIB,
                cache.size_bytes / GIB,
                step_bytes / GIB,
                free_memory_bytes(self._device) / GIB,
            )
        return Executor(runner, cache, source.config.eos_token_ids, look_ahead=looks_ahead(config))

    def _pool_pages(self, runner: ModelRunner, step_bytes: int) -> int:
        """As many on every rank: a page id means the same everywhere."""
        config = self._config
        concurrent = config.max_running_requests if isinstance(config, DecodeConfig) else PREFILL_POOL_CONTEXTS
        pages = pool_pages(
            config,
            token_bytes=runner.kv_token_bytes,
            most_useful_tokens=self._source.config.context_length * concurrent,
            free_bytes=free_memory_bytes(self._device) - step_bytes,
        )
        return self._parallel.agree_minimum(pages)

    def _capture_graphs(self, runner: ModelRunner, cache: KvCache) -> bool:
        """Whether decode steps over `cache` are CUDA graphs from now on."""
        config = self._config
        if not (isinstance(config, DecodeConfig) and config.cuda_graphs and self._device.type == "cuda"):
            return False
        context = min(self._source.config.context_length, cache.num_pages * config.page_size)
        return runner.capture_graphs(cache, max_batch=config.max_running_requests, max_context=context)

    def _measure_steps(self, runner: ModelRunner) -> int:
        """Device memory that steps need beside weights and KV, found by running the largest. It also compiles kernels,
        which the first request would otherwise wait for.
        """
        if self._device.type != "cuda":
            return 0
        started = time.monotonic()
        config = self._config
        longest = min(self._source.config.context_length, self._pool_pages(runner, 0) * config.page_size)
        try:
            needed = peak_bytes(self._device, lambda: self._dry_run(runner, longest))
        except torch.OutOfMemoryError as error:
            rows = "max_running_requests" if isinstance(config, DecodeConfig) else "chunk_size"
            raise StartupError(
                f"{rows} = {getattr(config, rows)}: {self._device} has not enough memory for such a step beside the "
                f"weights: {error}"
            ) from error
        log.info("largest steps tried in %.1f s: %.2f GiB", time.monotonic() - started, needed / GIB)
        return needed

    def _dry_run(self, runner: ModelRunner, longest: int) -> None:
        """The largest steps there can be, over a cache of a single page that stands for all others."""
        config = self._config
        cache = runner.make_cache(1, config.page_size)
        self._capture_graphs(runner, cache)
        executor = Executor(runner, cache, self._source.config.eos_token_ids)
        for rows in largest_steps(config, longest):
            executor.start(rows).finish()
        runner.release_graphs()

    def _ready(self) -> RankReady:
        cache = self._executor.cache
        sessions = self._receivers.sessions if self._receivers is not None else {}
        pools = (Pool(pool.layout, pool.memory.base_address, pool.memory.size_bytes) for pool in self._pools)
        return RankReady(
            self._rank,
            place=Rank(
                rank=self._rank,
                session=sessions.get("tcp"),
                pools=tuple(pools),
                machine=machine_id(),
                nvlink_session=sessions.get("nvlink"),
                rdma_session=sessions.get("rdma"),
            ),
            num_pages=cache.num_pages,
            dtype=cache.pools[0].dtype_name,
            device=str(self._device),
        )


def _layout(pool: KvPool) -> KvLayout:
    return KvLayout(
        planes=tuple(Plane(name, pool.head_token_bytes) for name in pool.planes),
        layer_start=pool.layers.start,
        layer_end=pool.layers.stop,
        head_start=pool.heads.start,
        head_end=pool.heads.stop,
        page_size=pool.page_size,
        num_pages=pool.num_pages,
        dtype=pool.dtype_name,
    )


def largest_steps(config: AnyServerConfig, longest: int) -> list[list[StepRow]]:
    """The steps that need most memory: of decode, the largest batch; of prefill, a chunk at the end of a prompt of
    `longest` tokens, and one of as many prompts as there may be.
    """
    sampling = SamplingParams(temperature=1.0, top_p=0.99)  # sampling that needs most

    def row(start: int, tokens: int) -> StepRow:
        pages = [0] * -(-(start + tokens) // config.page_size)
        return StepRow([0] * tokens, start, pages, draws=(Draw(sampling, 0),))

    if isinstance(config, DecodeConfig):
        return [[row(0, 1)] * config.max_running_requests]
    chunk = min(config.chunk_size, longest)
    prompts = min(config.chunk_size, config.max_queued_requests)
    return [[row(longest - chunk, chunk)], [row(0, config.chunk_size // prompts)] * prompts]


def looks_ahead(config: AnyServerConfig) -> bool:
    """Whether steps are given before the tokens they feed are known: with one stage, which has them on the device."""
    return isinstance(config, DecodeConfig) and config.pp == 1


def _meet(config: AnyServerConfig, rank: int, device: torch.device, meet_at: tuple[str, int] | None) -> Parallel:
    shard = Shard.of(rank, tp_size=config.tp, stages=config.pp)
    if meet_at is None:
        return Parallel(shard, device=device)
    # NCCL wants a GPU for each rank; ranks that share one (a test, a small machine) go through the host
    own_gpu = device.type == "cuda" and len(config.local_ranks) <= torch.cuda.device_count()
    backend: Backend = "nccl" if own_gpu else "gloo"
    log.info("rank %d of %d meets the others at %s:%d (%s)", rank, shard.world_size, *meet_at, backend)
    host, port = meet_at
    return Parallel.connect(
        shard, store_host=host, store_port=port, backend=backend, device=device, timeout_s=COLLECTIVE_TIMEOUT_S
    )
