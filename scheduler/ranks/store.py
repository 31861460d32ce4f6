"""The KV store on one rank: loads blocks into pages and writes blocks from pages, beside the steps.

Two threads, for loads and for writes, so that a write does not delay a prompt. Each has an agent process, because calls
of Mooncake Store may block for seconds (`transfer/store/agent.py`), and its own staging memory.
"""

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from ...configs.schema import AnyServerConfig, PrefillConfig
from ...kernels.backends.streams import use_own_stream, wait_for_arrivals, wait_for_stream
from ...models.config.model import ModelConfig
from ...models.config.sharding import Shard
from ...transfer.data.local_pool import LocalPool
from ...transfer.protocol.layout import KvLayout
from ...transfer.store.agent import CORRUPT, FOUND, Item
from ...transfer.store.blocks import BLOCK_TOKENS, PoolShard, read_plans
from ...transfer.store.channel import MOST_ITEMS, AgentChannel, Channel, NoReplyError
from ...transfer.store.client import StoreError
from ...transfer.store.staged_cells import StagedCells
from ..messages.ranks import RankReport, StoreLoad, StoreLoaded, StorePing, StorePinged, StoreWrite, StoreWritten

log = logging.getLogger(__name__)

STAGING_BYTES = 32 << 20
"""Staging memory for loads, and as much for writes; more if a block needs it."""
PING_TIMEOUT_S = 10.0
"""Longest wait for a reply to a ping. Mooncake itself gives up after 4 to 5 s."""
WRITE_TIMEOUT_S = 3.0
"""Longest wait for a reply during a write, which holds pages."""
PING_ITEM = Item("pdserve1/ping", 0, 0)


class RankStore:
    """The store as a rank uses it. `enqueue` may be called from any thread; reports come from other threads."""

    def __init__(
        self,
        rank: int,
        pools: Sequence[LocalPool],
        shards: Sequence[PoolShard],
        device: torch.device,
        *,
        report: Callable[[RankReport], None],
        open_channel: Callable[[int], Channel],
        loads: bool = True,
    ) -> None:
        """`open_channel(n)` opens a channel with n bytes of staging memory. Without `loads`, the rank only writes."""
        self._rank = rank
        self._device = device
        self._report = report
        self._reads: Channel | None = None
        if loads:
            plans = read_plans(shards)
            self._reads = reads = open_channel(max(STAGING_BYTES, *(StagedCells.bytes_of(plan) for plan in plans)))
            self._read_cells = [StagedCells(pools, plan, reads.memory) for plan in plans]
        own = tuple((index, cell) for index, shard in enumerate(shards) if shard.writes for cell in shard.cells)
        self._writes = open_channel(max(STAGING_BYTES, StagedCells.bytes_of(own)))
        self._write_cells = StagedCells(pools, own, self._writes.memory) if own else None
        self._loads: queue.SimpleQueue[tuple[StoreLoad, Callable[[], None], float] | Callable[[], None] | None]
        self._loads = queue.SimpleQueue()
        self._commands: queue.SimpleQueue[StoreWrite | StorePing | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (("store-reads", self._serve_loads), ("store-writes", self._serve_writes))
        ]
        for thread in self._threads:
            thread.start()

    def load(self, command: StoreLoad, wait: Callable[[], None]) -> None:
        """Queue a load; its timeout counts from now. `wait` returns when no earlier step writes its pages any more."""
        self._loads.put((command, wait, time.monotonic()))

    def enqueue(self, command: StoreWrite | StorePing) -> None:
        self._commands.put(command)

    def close(self) -> None:
        """End the threads and the agents. Waits for no reply of the store."""
        self._loads.put(None)
        self._commands.put(None)
        for channel in (self._reads, self._writes):
            if channel is not None:
                channel.close()
        for thread in self._threads:
            thread.join(PING_TIMEOUT_S)

    # -- loads -------------------------------------------------------------------------------------------------

    def _serve_loads(self) -> None:
        use_own_stream(self._device)
        while (entry := self._loads.get()) is not None:
            if isinstance(entry, tuple):
                self._report(self._load(*entry))
            else:
                entry()

    def _load(self, command: StoreLoad, wait: Callable[[], None], queued_at: float) -> StoreLoaded:
        started = time.monotonic()
        deadline = queued_at + command.timeout_s
        loaded = corrupt = size_bytes = 0
        problem: str | None = None
        if started >= deadline:
            return self._loaded(command, 0, started, 0, 0, late=True)
        reads = self._reads
        assert reads is not None, "a load on a rank that only writes"
        look_up = _Lookup(reads, deadline, command.lookup_timeout_s)
        late = False
        try:
            if busy_s := reads.busy_s():  # an earlier load was given up: this one would wait for it
                problem = f"the store has not answered for {busy_s:.1f} s" if busy_s > command.timeout_s else None
                return self._loaded(command, 0, started, 0, 0, problem, late=True)
            wait()
            while loaded < len(command.blocks):
                cells, found = self._find(look_up, command.blocks[loaded:])
                if cells is None:
                    break
                end = loaded + found
                for first in range(loaded, end, cells.most_blocks):
                    batch = command.blocks[first : min(first + cells.most_blocks, end)]
                    items = cells.items(batch)
                    outcomes = reads.call("get", items, deadline)
                    corrupt += outcomes.count(CORRUPT)
                    whole = _leading(outcomes, cells.cells)
                    if whole:
                        start = command.offset + first * BLOCK_TOKENS
                        cells.scatter(whole, command.pages, start, len(batch), skip=command.skip if not first else 0)
                        wait_for_stream(self._device)
                    loaded = first + whole
                    size_bytes += sum(item.payload_bytes for item in items[: whole * cells.cells])
                    if whole < len(batch):
                        return self._loaded(command, loaded, started, size_bytes, corrupt)
        except NoReplyError as error:
            late = True
            problem = str(error) if not loaded and time.monotonic() >= deadline else None
        except StoreError as error:
            problem = str(error)
        except Exception as error:
            log.exception("loading from the KV store failed")
            problem = f"{type(error).__name__}: {error}"
        return self._loaded(command, loaded, started, size_bytes, corrupt, problem, late=late)

    def _loaded(
        self,
        command: StoreLoad,
        blocks: int,
        started: float,
        size_bytes: int,
        corrupt: int,
        problem: str | None = None,
        *,
        late: bool = False,
    ) -> StoreLoaded:
        seconds = time.monotonic() - started
        return StoreLoaded(self._rank, command.number, blocks, seconds, size_bytes, corrupt, problem, late)

    def _find(self, look_up: "_Lookup", blocks: Sequence[bytes]) -> tuple[StagedCells | None, int]:
        """Look up how many of the first blocks are in the store. Returns the number, and the cells (by layer range)
        under which they were found.
        """
        for number, cells in enumerate(self._read_cells):
            found = look_up.leading(cells, blocks if number == 0 else blocks[:1])
            if found and number > 0:
                found = look_up.leading(cells, blocks)
            if found:
                return cells, found
        return None, 0

    # -- writes ------------------------------------------------------------------------------------------------

    def _serve_writes(self) -> None:
        use_own_stream(self._device)
        while (command := self._commands.get()) is not None:
            match command:
                case StoreWrite():
                    self._report(self._write(command))
                case StorePing():
                    self._ping()

    def _write(self, command: StoreWrite) -> StoreWritten:
        written = refused = size_bytes = 0
        problem: str | None = None
        try:
            runs = self._lacking(command.blocks)
            for first, count in runs:
                assert self._write_cells is not None
                wait_for_arrivals(self._device)
                self._write_cells.gather(count, command.pages, command.offset + first * BLOCK_TOKENS)
                items = self._write_cells.items(command.blocks[first : first + count])
                outcomes = self._writes.call("put", items, time.monotonic() + WRITE_TIMEOUT_S)
                written += _complete(outcomes, self._write_cells.cells)
                size_bytes += sum(item.payload_bytes for item, done in zip(items, outcomes, strict=True) if done)
                if FOUND not in outcomes:
                    break  # the store is full, or has no memory yet
            refused = sum(count for _, count in runs) - written
        except StoreError as error:
            problem = str(error)
        except Exception as error:
            log.exception("writing to the KV store failed")
            problem = f"{type(error).__name__}: {error}"
        return StoreWritten(self._rank, command.number, written, size_bytes, problem, refused)

    def _lacking(self, blocks: Sequence[bytes]) -> list[tuple[int, int]]:
        """Runs of blocks (start, count) that the store lacks, each of which fits into the staging memory."""
        cells = self._write_cells
        if cells is None:
            return []
        runs: list[tuple[int, int]] = []
        step = max(1, MOST_ITEMS // cells.cells)
        for first in range(0, len(blocks), step):
            part = blocks[first : first + step]
            outcomes = self._writes.call("exist", cells.items(part), time.monotonic() + WRITE_TIMEOUT_S)
            for index in range(len(part)):
                if all(outcomes[index * cells.cells : (index + 1) * cells.cells]):
                    continue
                if runs and sum(runs[-1]) == first + index and runs[-1][1] < cells.most_blocks:
                    runs[-1] = (runs[-1][0], runs[-1][1] + 1)
                else:
                    runs.append((first + index, 1))
        return runs

    def _ping(self) -> None:
        """Try both channels, each on its own thread."""
        problem = _try(self._writes)
        self._loads.put(lambda: self._report(StorePinged(self._rank, _try(self._reads) or problem)))


def _try(channel: Channel | None) -> str | None:
    """Why a channel does not work, if so."""
    try:
        if channel is not None:
            channel.call("exist", [PING_ITEM], time.monotonic() + PING_TIMEOUT_S)
    except StoreError as error:
        return str(error)
    except Exception as error:
        log.exception("the KV store cannot be reached")
        return f"{type(error).__name__}: {error}"
    return None


@dataclasses.dataclass(frozen=True)
class _Lookup:
    """Asks the store what it has, which takes a millisecond. A prompt waits `timeout_s` for the reply."""

    reads: Channel
    deadline: float
    timeout_s: float

    def leading(self, cells: StagedCells, blocks: Sequence[bytes]) -> int:
        """How many of the first blocks are in the store."""
        step = max(1, MOST_ITEMS // cells.cells)
        for first in range(0, len(blocks), step):
            part = blocks[first : first + step]
            items, deadline = cells.items(part), min(self.deadline, time.monotonic() + self.timeout_s)
            found = _leading(self.reads.call("exist", items, deadline), cells.cells)
            if found < len(part):
                return first + found
        return len(blocks)


def _leading(outcomes: Sequence[int], cells: int) -> int:
    """The number of complete blocks before the first incomplete one; a block has `cells` cells."""
    lost = next((index for index, outcome in enumerate(outcomes) if outcome != FOUND), len(outcomes))
    return lost // cells


def _complete(outcomes: Sequence[int], cells: int) -> int:
    """The number of complete blocks; a block has `cells` cells."""
    parts = (outcomes[first : first + cells] for first in range(0, len(outcomes), cells))
    return sum(all(outcome == FOUND for outcome in part) for part in parts)


def open_store(
    config: AnyServerConfig,
    model: ModelConfig,
    shard: Shard,
    rank: int,
    pools: Sequence[LocalPool],
    device: torch.device,
    report: Callable[[RankReport], None],
) -> RankStore | None:
    """The store of a rank; None if none is configured."""
    url = config.kv_store
    if url is None:
        return None
    shards = [pool_shard(pool.layout, model, shard) for pool in pools]
    return RankStore(
        rank,
        pools,
        shards,
        device,
        report=report,
        open_channel=lambda size_bytes: AgentChannel(url, config.public_host, size_bytes),
        loads=isinstance(config, PrefillConfig) or config.local_prefill != "never",
    )


def pool_shard(layout: KvLayout, model: ModelConfig, shard: Shard) -> PoolShard:
    """How a pool of a rank is cut into cells, and whether this rank writes them."""
    heads = model.num_kv_heads if "k" in layout.kind else 1
    replicas = max(1, shard.tp_size // heads)
    dsa = model.dsa

    def stage_layers(stages: int) -> list[range]:
        if stages > model.num_layers or (dsa is not None and stages > sum(dsa.indexed)):
            return []
        of_stages = [Shard(stage=stage, stages=stages) for stage in range(stages)]
        if dsa is None:
            return [of.layers(model.num_layers) for of in of_stages]
        indexer = "indexer" in layout.kind
        return [dsa.stage_indexers(of) if indexer else dsa.stage_layers(of) for of in of_stages]

    return PoolShard(layout, stage_layers, writes=shard.tp_rank % replicas == 0)
