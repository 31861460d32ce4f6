"""One rank: its part of the model, its KV, its side of the transfers. It runs the commands of the leader.

build     weights -> KV cache -> CUDA graphs -> transfer engines -> RankReady
serve     commands in order; steps may overlap: the results of one are read while the next one runs
transfer  commands about complete KV, which do not wait for steps
"""

import collections
import contextlib
import logging
import queue
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...common.stuck import Watch
from ...configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from ...kernels.backends.streams import use_own_stream, wait_for_arrivals, wait_for_stream
from ...memory.device import resolve_device
from ...memory.hisparse.cache import HiSparseCache, HiSparseError
from ...memory.page_store import PageStore
from ...memory.sizing import GIB
from ...models.config.sharding import RankTokens
from ...models.loading.catalog import ModelSource
from ...transfer.data.chunks import PartScatter
from ...transfer.data.local_pool import LocalPool
from ..messages.ranks import (
    AssistStep,
    CacheChecked,
    CheckCache,
    CommandDone,
    ComputeCommand,
    CopyDone,
    CopyPage,
    DropGrammar,
    DropGrammarState,
    DropPages,
    HotCounters,
    KvVerified,
    LoadPages,
    OpenHot,
    PrepareGrammar,
    PrepareMask,
    RankFailed,
    RankReady,
    RankReport,
    ResizeHot,
    RunStep,
    SavePages,
    StepDone,
    StopRank,
    StoreLoad,
    StorePing,
    StoreWrite,
    TransferCommand,
    VerifyKv,
    WriteBackRows,
)
from .builder import RankBuilder
from .executor import PendingStep
from .grammar_thread import GrammarThread
from .mask_threads import MaskThreads
from .page_mover import PageMover
from .process import rank_threads
from .rendezvous import join_ranks
from .store import open_store
from .transfers.announcement import announced_rank, layout_of
from .transfers.kv_check import verify_kv
from .transfers.rank_transfers import DecodeTransfers, PrefillTransfers

log = logging.getLogger(__name__)

HOT_REPORT_S = 0.2
COMMAND_POLL_S = 1e-4
"""Interval of the checks whether a step is done; its tokens wait at most this long for the check."""


class PendingCommand(NamedTuple):
    """A step, or a copy of a page, that may still run on the device."""

    command_id: int
    step: PendingStep
    is_step: bool = True


class RankEngine:
    """All parts of one rank. Built, run and closed on one thread; `report` must be callable from any thread."""

    def __init__(
        self,
        config: AnyServerConfig,
        source: ModelSource,
        rank: int,
        *,
        meet_at: tuple[str, int] | None,
        report: Callable[[RankReport], None],
    ) -> None:
        """`meet_at` is the rendezvous address of the ranks, None for a single rank. Raises StartupError."""
        self._config = config
        self._report = report
        self._rank = rank
        local = rank - config.local_ranks.start
        if (threads := rank_threads(config)) is not None:
            torch.set_num_threads(threads)
        self._device = resolve_device(config.device, local, len(config.local_ranks))
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        use_own_stream(self._device)
        self._parallel = join_ranks(config, rank, self._device, meet_at)
        self._peer_rank = self._parallel.shard.attention.rank
        """The number of this rank for peers. They see every data-parallel rank as a server of its own."""
        builder = RankBuilder(config, source, self._parallel, self._device)
        self._step_limit = builder.step_limit
        self._executor = builder.build()
        self._grammars: GrammarThread | None = None
        self._masks: MaskThreads | None = None
        if self._parallel.shard.samples:
            assert self._executor.grammars is not None, "the builder sets it"
            self._grammars = GrammarThread(self._executor.grammars.compiler, rank, report)
            self._masks = MaskThreads(self._executor.grammars, rank, report)
        self._parallel.start_serving()
        wait_for_stream(self._device)  # the pools are zeroed before a peer can write them
        self._parallel.check()
        retract_gib = config.retract_memory_gib if isinstance(config, DecodeConfig) else 0
        self._mover = PageMover(
            self._executor.cache,
            PageStore.allocate(self._executor.cache, int(retract_gib * GIB)),
            on_done=lambda copy, seconds: report(CopyDone(rank, copy, seconds)),
            on_failed=lambda reason: report(RankFailed(rank, reason)),
        )
        self._pools = [LocalPool(pool, layout_of(pool)) for pool in self._executor.cache.pools]
        shard = self._parallel.shard.attention
        self._store = open_store(config, source.config, shard, rank, self._pools, self._device, report)
        self._writes: PrefillTransfers | None = None
        self._arrivals: DecodeTransfers | None = None
        match config:
            case PrefillConfig():
                self._writes = PrefillTransfers(
                    config, self._pools, rank, report, peer_rank=self._peer_rank, local_rank=local
                )
            case DecodeConfig():
                self._arrivals = DecodeTransfers(
                    config,
                    self._pools,
                    rank,
                    report,
                    kv_heads=source.config.num_kv_heads,
                    local_rank=local,
                )
        self._pending: collections.deque[PendingCommand] = collections.deque()
        # on the CPU, and with gloo, `start` returns when the step is done: its tokens do not wait for the next step
        self._steps_ahead = 2 if self._device.type == "cuda" and self._parallel.on_device else 1
        self._stepping_s = 0.0
        self._command: tuple[str, float] | None = None
        """The command that runs now, unless it is a step, and since when."""
        self._watch = Watch()
        self._hot_report_at = 0.0

    def announce(self) -> None:
        """Report that this rank is ready for commands."""
        self._report(self._ready())

    def problems(self) -> tuple[str, ...]:
        """Which threads of this rank are stuck, except in a step: the leader measures those. Called a few times a
        second, on another thread.
        """
        self._watch.check()
        found = self._writes.writer.problems() if self._writes is not None else []
        if not self._watch.is_steady:  # asked afterwards: this process may have been stopped in between
            found = []
        scatterer = self._arrivals.scatterer if self._arrivals is not None else None
        name, since = self._command or ("", None)
        for thread, busy_since in (
            (f"command {name}", since),
            ("the page store", self._mover.busy_since),
            ("the scatter thread", scatterer.busy_since if scatterer is not None else None),
        ):
            if busy_since is not None and self._watch.is_stuck(age_s := time.monotonic() - busy_since):
                found.append(f"rank {self._rank}: {thread} has made no progress for {age_s:.0f} s")
        return tuple(found)

    @property
    def busy_s(self) -> float:
        """Time spent on steps, minus the time spent waiting for the previous stage. May be read from another thread."""
        return self._stepping_s - self._parallel.waited_s

    def serve(self, commands: "queue.SimpleQueue[ComputeCommand]") -> None:
        """Run commands until StopRank."""
        while True:
            command = next_command(commands, self._pending, self._steps_ahead)
            if command is None:
                self._finish_step()
            elif isinstance(command, StopRank):
                return
            elif isinstance(command, RunStep | AssistStep):
                self._run(command)
            else:
                self._command = type(command).__name__, time.monotonic()
                self._run(command)
                self._command = None

    def transfer(self, command: TransferCommand) -> None:
        """Run a command about complete KV. Called from another thread; does not wait.

        Does not raise: the report of a transfer has its error, and any other error is reported as RankFailed.
        """
        try:
            self._transfer(command)
        except Exception as error:
            name = type(command).__name__
            log.exception("rank %d: %s failed", self._rank, name)
            self._report(RankFailed(self._rank, f"{name} failed: {type(error).__name__}: {error}"))

    def _transfer(self, command: TransferCommand) -> None:
        match command:
            case PrepareGrammar():
                if self._grammars is not None:
                    self._grammars.prepare(command)
            case DropGrammar(number=number):
                if self._grammars is not None:
                    self._grammars.drop(number)
            case DropGrammarState(grammar_state=key):
                if self._masks is not None:
                    self._masks.drop(key)
            case PrepareMask():
                if self._masks is not None:
                    self._masks.prepare(command)
            case StoreWrite() | StorePing():
                assert self._store is not None, "a command for a rank without a KV store"
                self._store.enqueue(command)
            case PartScatter():
                scatterer = self._arrivals.scatterer if self._arrivals is not None else None
                assert scatterer is not None, "PartScatter for a rank without a staging ring"
                scatterer.scatter(command)
            case _:
                assert self._writes is not None, "only prefill ranks write chunks"
                self._writes.run(command)

    def close(self) -> None:
        """Leave the process group and release all memory that peers could write."""
        if self._store is not None:
            self._store.close()
        self._mover.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._masks is not None:
            self._masks.close()
        if self._writes is not None:
            self._writes.close()
        if self._arrivals is not None:
            self._arrivals.close()
        self._executor.cache.close()
        self._parallel.close()

    def _run(self, command: ComputeCommand) -> None:
        match command:
            case RunStep():
                self._start_step(command)
            case AssistStep(ranks=ranks):
                self._assist(ranks)
            case CopyPage():
                self._copy_page(command)
            case SavePages() | LoadPages() | DropPages() | WriteBackRows():
                self._mover.enqueue(command)
            case StoreLoad():
                assert self._store is not None, "a command for a rank without a KV store"
                self._store.load(command, PendingStep(self._device).wait)
            case OpenHot() | ResizeHot():
                self._set_hot(command)
            case CheckCache():
                self._report(CacheChecked(self._rank, self._check_cache()))
                self._report_hot(settled=True)
            case VerifyKv():
                wait_for_arrivals(self._device)
                found = verify_kv(
                    command, self._pools, self._executor.cache, rank=self._rank, peer_rank=self._peer_rank
                )
                self._report(KvVerified(self._rank, command.key, *found))
            case _:
                raise TypeError(f"unexpected command: {command!r}")

    # -- steps and pages ---------------------------------------------------------------------------------------

    def _start_step(self, command: RunStep) -> None:
        """Start a step. A single rank continues after a failed step; one of several ranks exits, because the others
        would wait for it in collectives.
        """
        started = time.monotonic()
        if self._arrivals is not None:
            wait_for_arrivals(self._device)
        try:
            step = self._executor.start(command.rows, command.ranks or None)
        except Exception as error:
            if self._parallel.shard.world_size > 1:
                raise
            while self._pending:  # reports are sent in order
                self._finish_step()
            self._step_failed(command.command_id, error)
        else:
            self._pending.append(PendingCommand(command.command_id, step))
            if self._writes is not None:
                self._writes.early_writes.step_started(command.command_id, step.wait)
        self._stepping_s += time.monotonic() - started

    def _assist(self, ranks: Sequence[RankTokens]) -> None:
        """Take part in a step of other data-parallel ranks. If it fails, the rank exits: the others wait for it."""
        started = time.monotonic()
        self._executor.assist(ranks)
        self._stepping_s += time.monotonic() - started

    def _finish_step(self) -> None:
        """Wait for the oldest step or copy in flight, and report it. If a copy fails, the rank exits: the leader would
        wait for the page.
        """
        command_id, step, is_step = self._pending.popleft()
        started = time.monotonic()
        try:
            results = step.finish()
            self._parallel.check()
        except Exception as error:
            if self._parallel.shard.world_size > 1 or not is_step:
                raise
            self._step_failed(command_id, error)
            return
        if not is_step:
            self._report(CommandDone(self._rank, command_id))
            return
        if results is not None:
            self._report(StepDone(self._rank, command_id, tuple(results)))
        self._sample_next()
        self._stepping_s += time.monotonic() - started
        self._report_hot()

    def _sample_next(self) -> None:
        """Sample the tokens of the next step, if its grammars had to wait for the tokens of the step that is now done.
        The device may still be computing the logits.
        """
        following = next((pending for pending in self._pending if pending.is_step), None)
        if following is not None:
            following.step.sample()

    def _step_failed(self, command_id: int, error: Exception) -> None:
        if self._writes is not None:
            self._writes.early_writes.step_failed(command_id)
        log.exception("step %d failed", command_id, exc_info=error)
        self._report(StepDone(self._rank, command_id, (), f"{type(error).__name__}: {error}"))

    def _copy_page(self, command: CopyPage) -> None:
        """Copy a page in order with the steps. Its end is reported; after that, peers may write the page."""
        wait_for_arrivals(self._device)
        self._executor.cache.copy_page(command.source, command.destination, command.tokens)
        self._pending.append(PendingCommand(command.command_id, PendingStep(self._device), is_step=False))

    def _set_hot(self, command: OpenHot | ResizeHot) -> None:
        """Set up or resize a hot buffer in order with the steps: the device does it after those already started."""
        cache = self._executor.cache
        assert isinstance(cache, HiSparseCache), "only a HiSparse cache has hot buffers"
        match command:
            case OpenHot():
                cache.open(command.slot, command.hot_pages, command.tokens, command.capacity)
                if command.copy is not None:
                    self._mover.enqueue(command)
            case ResizeHot():
                cache.resize(command.slot, command.hot_pages, command.capacity)

    def _report_hot(self, *, settled: bool = False) -> None:
        """Report the totals of the hot buffers, a few times a second, and with `settled` the exact totals of an idle
        rank. All tensor-parallel ranks of a stage have the same totals, so only the first reports.
        """
        cache, now = self._executor.cache, time.monotonic()
        if not isinstance(cache, HiSparseCache) or self._parallel.shard.attention.tp_rank != 0:
            return
        if settled:
            cache.counters()
            cache.wait()  # for the copy of the totals that this has started
        if settled or now >= self._hot_report_at:
            self._hot_report_at = now + HOT_REPORT_S
            self._report(HotCounters(self._rank, cache.counters()))

    def _check_cache(self) -> str | None:
        cache = self._executor.cache
        try:
            if isinstance(cache, HiSparseCache):
                cache.check_integrity()
        except HiSparseError as error:
            return str(error)
        return None

    def _ready(self) -> RankReady:
        cache = self._executor.cache
        hot = cache if isinstance(cache, HiSparseCache) else None
        return RankReady(
            self._rank,
            peer_info=announced_rank(
                self._peer_rank,
                self._pools,
                hot,
                sessions=self._arrivals.receivers.sessions if self._arrivals is not None else {},
                ring=self._arrivals.ring if self._arrivals is not None else None,
                staging=self._config.staging,
                device=self._device,
            ),
            num_pages=cache.num_pages,
            step_limit=self._step_limit,
            dtype=cache.pools[0].dtype_name,
            device=str(self._device),
            weight_bytes=self._executor.weight_bytes,
            device_kv_bytes=cache.device_bytes,
            host_kv_bytes=hot.host.size_bytes if hot is not None else 0,
            hot_pages=hot.hot.num_pages if hot is not None else None,
            hot_rows=hot.tables.hot_rows if hot is not None else None,
        )


def next_command(
    commands: "queue.SimpleQueue[ComputeCommand]",
    pending: "collections.deque[PendingCommand]",
    steps_ahead: int,
) -> ComputeCommand | None:
    """The next command to run. Returns None if the caller has to finish the first of the `pending` steps now: because
    `steps_ahead` steps have started, or because that step is done and no command waits.

    With overlap scheduling, the leader sends the next step while the current one runs. So this function waits for
    commands, not for the device: otherwise the next step would start late, and the device would idle.
    """
    if not pending:
        return commands.get()
    if len(pending) < steps_ahead:
        while not (pending[0].step.done and commands.empty()):
            with contextlib.suppress(queue.Empty):
                return commands.get(timeout=COMMAND_POLL_S)
    return None
