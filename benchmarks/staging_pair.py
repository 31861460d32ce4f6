"""The two processes of benchmarks/staging.py: Prefill has a pool per rank, Decode a pool of all heads and a ring."""

import collections
import dataclasses
import itertools
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from pdserve.common.arithmetic import ceil_div, round_up
from pdserve.kernels.staging.kv_stage import kv_gather, kv_scatter
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.decode.memory.holds import Holds
from pdserve.scheduler.decode.rooms.staging import RankRing, StagedArrivals
from pdserve.scheduler.messages.effects import Effect, SendToPeer
from pdserve.scheduler.prefill.staging import StagedSends
from pdserve.transfer.data.chunks import ChunkWrite, ChunkWritten, PartScatter, PartWrite, PartWritten
from pdserve.transfer.mooncake.engine import ReceiveEngine
from pdserve.transfer.mooncake.library import Transport, create_engine
from pdserve.transfer.plan.copy_regions import CopyRegion
from pdserve.transfer.plan.copy_runs import CopyRuns, expand_runs
from pdserve.transfer.plan.ring import ALIGNMENT, StagingRing
from pdserve.transfer.plan.staged_regions import StagedRegion
from pdserve.transfer.protocol.layout import KvLayout, Plane
from pdserve.transfer.protocol.messages import (
    InstanceId,
    StageArrived,
    StageFree,
    StageGrant,
    StagePart,
    StageRequest,
    StageRing,
    StageStopped,
    TransferKey,
)

BATCH = 1024
"""Mooncake's queue to one peer breaks above 2,048 writes."""
SMALL_WRITE = 64 << 10
WINDOW = 8
PREFILL, DECODE = InstanceId("prefill"), InstanceId("decode")
ELEMENT = 2


@dataclasses.dataclass(frozen=True)
class Shape:
    """The model's KV, the two servers, and the layout of each process's buffer."""

    device: str
    transport: Transport
    tokens: int
    slice_tokens: int
    layers: int
    heads: int
    head_dim: int
    ranks: int
    page_size: int
    decode_page_size: int
    part_bytes: int
    ring_bytes: int
    write_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.head_dim * ELEMENT

    @property
    def rank_heads(self) -> int:
        return self.heads // self.ranks

    @property
    def total_bytes(self) -> int:
        return self.layers * 2 * self.heads * self.tokens * self.row_bytes

    def pages(self, page_size: int) -> int:
        return ceil_div(self.tokens, page_size)

    def layout(self, heads: range, page_size: int) -> KvLayout:
        planes = (Plane("k", self.row_bytes), Plane("v", self.row_bytes))
        pages = self.pages(page_size)
        return KvLayout(planes, 0, self.layers, heads.start, heads.stop, page_size, pages, "bfloat16")

    def heads_of(self, rank: int) -> range:
        return range(rank * self.rank_heads, (rank + 1) * self.rank_heads)

    def staged_regions(self) -> list[StagedRegion]:
        """Every prefill rank stages its heads to the one decode rank."""
        ring, token_bytes = StageRing(0, self.ring_bytes, epoch=1), 2 * self.layers * self.rank_heads * self.row_bytes
        return [
            StagedRegion(
                CopyRegion(rank, 0, range(self.layers), self.heads_of(rank)), ring, token_bytes, self.part_bytes
            )
            for rank in range(self.ranks)
        ]

    def order(self, page_size: int, seed: int) -> list[int]:
        """Pages of a sequence, scattered over the pool."""
        return [int(page) for page in np.random.default_rng(seed).permutation(self.pages(page_size))]

    def values(self, tokens: int) -> torch.Tensor:
        """The KV of the prompt, `[layer, plane, head, token, dim]`: the same in both processes."""
        generator = torch.Generator(self.device).manual_seed(tokens)
        shape = (self.layers, 2, self.heads, tokens, self.row_bytes // 8)
        limits = torch.iinfo(torch.int64)
        whole = torch.randint(limits.min, limits.max, shape, dtype=torch.int64, generator=generator, device=self.device)
        return whole.view(torch.uint8)


class Memory:
    """One buffer, allocated from its start, so that every arm uses one registration and one base address."""

    def __init__(self, shape: Shape, size_bytes: int) -> None:
        self.shape = shape
        self.buffer = torch.zeros(size_bytes, dtype=torch.uint8, device=shape.device)
        self._used = 0

    def take(self, size_bytes: int) -> tuple[int, torch.Tensor]:
        """The offset and the bytes of a new part."""
        offset = self._used
        self._used += round_up(size_bytes, ALIGNMENT)
        assert self._used <= len(self.buffer)
        return offset, self.buffer[offset : offset + size_bytes]

    def pool(self, heads: range, page_size: int) -> "Pool":
        layout = self.shape.layout(heads, page_size)
        offset, data = self.take(layout.size_bytes)
        dims = (layout.num_pages, layout.num_layers, 2, layout.num_heads, page_size, self.shape.row_bytes)
        return Pool(layout, offset, data.view(dims))


@dataclasses.dataclass(frozen=True)
class Pool:
    layout: KvLayout
    offset: int
    data: torch.Tensor

    def tokens(self, order: list[int], count: int) -> torch.Tensor:
        """A copy of a sequence, `[layer, plane, head, token, bytes]`."""
        return self.data[order].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, :count].contiguous()

    def fill(self, order: list[int], values: torch.Tensor) -> None:
        tokens, size = values.shape[3], self.layout.page_size
        for index, page in enumerate(order):
            part = values[:, :, :, index * size : min((index + 1) * size, tokens)]
            self.data[page, :, :, :, : part.shape[3]] = part


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def mark(device: str) -> torch.cuda.Event | None:
    """An event after the work enqueued last; None if calls are synchronous."""
    if device != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


class Decode:
    """The receiving process: a pool of all heads, a pool per rank for equal TP, and the ring."""

    def __init__(self, shape: Shape, control: Connection) -> None:
        self.shape = shape
        self.control = control
        self.memory = Memory(shape, shape.total_bytes * 3 + shape.ring_bytes + (64 << 20))
        self.whole = self.memory.pool(range(shape.heads), shape.decode_page_size)
        self.equal = [self.memory.pool(shape.heads_of(rank), shape.page_size) for rank in range(shape.ranks)]
        self.ring_offset, self.ring = self.memory.take(shape.ring_bytes)
        self.order = shape.order(shape.decode_page_size, seed=100)
        self.pages = torch.tensor(self.order, dtype=torch.int32, device=shape.device)
        self.equal_order = shape.order(shape.page_size, seed=101)
        self.effects: list[Effect] = []
        rings = [RankRing(StagingRing(shape.ring_bytes), cell_bytes=2 * shape.row_bytes)]
        allocator = PageAllocator[KvPage](max(self.order) + 1)
        allocator.grant("all, so that transfers can share them", allocator.num_pages)
        grant = allocator.grant("prompt", 0, shared=[KvPage(page) for page in self.order])
        assert grant is not None
        self.grant = grant
        commands = Holds(allocator)
        self.staging = StagedArrivals(rings, shape.decode_page_size, 1.0, collections.Counter(), self.effects, commands)
        self.staging.peer_up(PREFILL, shape.staged_regions())
        self.scatters: list[tuple[StagePart, torch.cuda.Event | None]] = []
        self.engine = ReceiveEngine("127.0.0.1", transport=shape.transport)
        self.engine.register(self.memory.buffer.data_ptr(), len(self.memory.buffer))

    def run(self) -> None:
        self.control.send((self.engine.session, self.memory.buffer.data_ptr(), len(self.memory.buffer)))
        self.control.send((self.whole.offset, [pool.offset for pool in self.equal], self.ring_offset))
        while True:
            if self.scatters and not self.control.poll():
                self.collect()
                continue
            message = self.control.recv()
            match message:
                case "landed":  # the direct arms: only confirm
                    self.control.send("landed")
                case "poison":
                    self.memory.buffer.fill_(0xA5)
                    wait(self.shape.device)
                    self.control.send("poisoned")
                case ("check", arm, tokens):
                    self.control.send(self.check(arm, tokens))
                case TransferKey():
                    self.staging.open(message, PREFILL, 0, self.shape.tokens, self.grant)
                case StageRequest() | StageArrived() | StageStopped():
                    problem = self.staging.receive(PREFILL, message, time.monotonic())
                    if problem is not None:
                        raise RuntimeError(problem)
                    self.act()
                case "end":
                    break
        self.engine.close()

    def act(self) -> None:
        for effect in self.effects:
            match effect:
                case SendToPeer(message=message):
                    self.control.send(message)
                case PartScatter(part=part, offset=offset, size_bytes=size_bytes):
                    kv_scatter(
                        self.ring[offset:][:size_bytes],
                        self.whole.data,
                        self.pages,
                        start=part.token_start,
                        end=part.token_end,
                        layers=range(part.block.layer_start, part.block.layer_end),
                        heads=range(part.block.head_start, part.block.head_end),
                    )
                    self.scatters.append((part, mark(self.shape.device)))
                case unexpected:
                    raise RuntimeError(f"unexpected effect on decode: {unexpected}")
        self.effects.clear()

    def collect(self) -> None:
        for part, done in list(self.scatters):
            if done is None or done.query():  # type: ignore[no-untyped-call]
                self.scatters.remove((part, done))
                self.staging.scattered(part)
                self.act()
                if not self.staging.misses(part.key):
                    self.control.send("landed")
                    self.staging.close(part.key)

    def check(self, arm: str, tokens: int) -> bool:
        """Whether this process has exactly the prompt's KV after the last run of an arm."""
        values = self.shape.values(tokens)
        if arm == "token slices":
            rows = (self.shape.layers, 2, tokens, self.shape.heads, self.shape.row_bytes)
            found = self.whole.data.view(-1)[: values.numel()].view(rows).transpose(2, 3)
            return bool((found == values).all())
        if arm == "equal TP":
            parts = [pool.tokens(self.equal_order, tokens) for pool in self.equal]
            return torch.cat(parts, dim=2).equal(values)
        return self.whole.tokens(self.order, tokens).equal(values)


def decode_process(shape: Shape, control: Connection) -> None:
    torch.set_num_threads(1)
    Decode(shape, control).run()


@dataclasses.dataclass
class Run:
    """One timed run of an arm. `copies` are the copies of the arm, `requests` the Mooncake requests for them."""

    seconds: float
    tokens: int
    copies: int
    requests: int
    bytes_written: int


class Prefill:
    """The writing process: one pool per rank, two staging buffers, and the engine, whose requests it counts."""

    def __init__(self, shape: Shape, control: Connection) -> None:
        self.shape = shape
        self.control = control
        staging = 2 * (shape.part_bytes + ALIGNMENT)
        self.memory = Memory(shape, shape.total_bytes * 3 // 2 + staging + (64 << 20))
        self.pools = [self.memory.pool(shape.heads_of(rank), shape.page_size) for rank in range(shape.ranks)]
        self.buffers = [self.memory.take(shape.part_bytes) for _ in range(2)]
        self.orders = [shape.order(shape.page_size, seed=rank) for rank in range(shape.ranks)]
        self.pages = [torch.tensor(order, dtype=torch.int32, device=shape.device) for order in self.orders]
        self.session, self.decode_base, self.decode_bytes = control.recv()
        self.whole_offset, self.equal_offsets, self.ring_offset = control.recv()
        # The library's engine, not transfer/mooncake/engine.py's: only it has the batch call.
        self.engine: Any = create_engine("127.0.0.1", shape.transport)
        self.requests = 0
        self.bytes_written = 0
        self.keys = (TransferKey(number, 1) for number in itertools.count(1))
        self.effects: list[Effect] = []
        self.staging = StagedSends(shape.page_size, collections.Counter(), self.effects)
        self.staging.regions[DECODE] = shape.staged_regions()

    def fill_pages(self, tokens: int) -> None:
        values = self.shape.values(tokens)
        for rank, pool in enumerate(self.pools):
            pool.fill(self.orders[rank], values[:, :, self.shape.heads_of(rank).start : self.shape.heads_of(rank).stop])
        wait(self.shape.device)

    def fill_rows(self, tokens: int) -> None:
        """Token-major pools, `[layer][plane][token][head][dim]`, in the memory of the page-major ones."""
        values = self.shape.values(tokens).transpose(2, 3)
        for rank, pool in enumerate(self.pools):
            heads = self.shape.heads_of(rank)
            part = values[:, :, :, heads.start : heads.stop].contiguous().view(-1)
            pool.data.view(-1)[: len(part)] = part
        wait(self.shape.device)

    def plan(self, arm: str) -> CopyRuns:
        """The copies of a direct arm; offsets are those of the two processes' buffers."""
        shape = self.shape
        if arm == "token slices":
            return self._join([self._token_slices(rank) for rank in range(shape.ranks)])
        plans = []
        for rank, pool in enumerate(self.pools):
            if arm == "equal TP":
                target, order = shape.layout(shape.heads_of(rank), shape.page_size), shape.order(shape.page_size, 101)
                offset = self.equal_offsets[rank]
            else:
                target = shape.layout(range(shape.heads), shape.decode_page_size)
                order, offset = shape.order(shape.decode_page_size, 100), self.whole_offset
            runs = expand_runs(pool.layout, target, self.orders[rank], order, 0, shape.tokens)
            plans.append(CopyRuns(runs.source + pool.offset, runs.destination + offset, runs.length))
        return self._join(plans)

    def _token_slices(self, rank: int) -> CopyRuns:
        shape = self.shape
        row = np.arange(2 * shape.layers * shape.slice_tokens, dtype=np.int64)
        size = shape.rank_heads * shape.row_bytes
        return CopyRuns(
            self.pools[rank].offset + row * size,
            self.whole_offset + row * shape.heads * shape.row_bytes + rank * size,
            np.full_like(row, size),
        )

    @staticmethod
    def _join(plans: list[CopyRuns]) -> CopyRuns:
        columns = ("source", "destination", "length")
        return CopyRuns(*(np.concatenate([getattr(plan, column) for plan in plans]) for column in columns))

    def direct(self, arm: str, runs: CopyRuns) -> Run:
        tokens = self.shape.slice_tokens if arm == "token slices" else self.shape.tokens
        self.requests = self.bytes_written = 0
        started = time.perf_counter()
        self.write(runs)
        self.control.send("landed")
        assert self.control.recv() == "landed"
        seconds = time.perf_counter() - started
        return Run(seconds, tokens, len(runs), self.requests, self.bytes_written)

    def staged(self) -> Run:
        shape = self.shape
        key = next(self.keys)
        self.control.send(key)
        self.requests = self.bytes_written = 0
        self.staging.request((DECODE, key), 0, shape.tokens)
        parts = self.staging.parts
        self.act()
        for _ in range(min(parts, shape.ring_bytes // shape.part_bytes)):
            self.receive(self.control.recv())

        started = time.perf_counter()
        landed = False
        source_pages = list(range(shape.pages(shape.page_size)))  # gather() has the page table of each rank
        self.staging.send(ChunkWrite(DECODE, key, 0, shape.tokens, source_pages, []))
        ready = self.act()
        gathered: list[tuple[PartWrite, int, torch.cuda.Event | None]] = []
        buffers = itertools.cycle(self.buffers)
        while not landed:
            while ready and len(gathered) < 2:
                gathered.append(self.gather(ready.pop(0), *next(buffers)))
            if gathered:
                write, offset, done = gathered[0]
                if done is not None:
                    done.synchronize()
                source, destination = np.array([offset]), np.array([self.ring_offset + write.offset])
                self.write(CopyRuns(source, destination, np.array([write.size_bytes])))
                gathered.pop(0)
                self.staging.part_written(PartWritten(DECODE, write.part, ok=True))
                self.act()
            while not landed and (self.control.poll() or not (ready or gathered)):
                message = self.control.recv()
                landed = message == "landed"
                if not landed:
                    ready += self.receive(message)
        seconds = time.perf_counter() - started
        self.staging.chunk_written(ChunkWritten(DECODE, key, 0, shape.tokens, ok=True))
        return Run(seconds, shape.tokens, parts, self.requests, self.bytes_written)

    def receive(self, message: object) -> list[PartWrite]:
        if not isinstance(message, StageGrant | StageFree):
            raise RuntimeError(f"unexpected message from decode: {message}")
        if isinstance(message, StageGrant) and (problem := self.staging.granted(DECODE, message)) is not None:
            raise RuntimeError(problem)
        return self.act()

    def act(self) -> list[PartWrite]:
        """Send the messages to decode; returns the parts to write now."""
        writes = []
        for effect in self.effects:
            match effect:
                case SendToPeer(message=message):
                    self.control.send(message)
                case PartWrite():
                    writes.append(effect)
                case unexpected:
                    raise RuntimeError(f"unexpected effect on prefill: {unexpected}")
        self.effects.clear()
        return writes

    def gather(
        self, write: PartWrite, offset: int, buffer: torch.Tensor
    ) -> tuple[PartWrite, int, torch.cuda.Event | None]:
        part = write.part
        kv_gather(
            self.pools[part.writer].data,
            self.pages[part.writer],
            buffer[: write.size_bytes],
            start=part.token_start,
            end=part.token_end,
            layers=range(self.shape.layers),
            heads=range(self.shape.rank_heads),
        )
        return write, offset, mark(self.shape.device)

    def write(self, runs: CopyRuns) -> None:
        """Write all of it and wait. Counts the Mooncake requests."""
        pieces = runs.split(self.shape.write_bytes)
        source = (pieces.source + self.memory.buffer.data_ptr()).tolist()
        destination = (pieces.destination + self.decode_base).tolist()
        length = pieces.length.tolist()
        self.requests += len(length)
        self.bytes_written += pieces.total_bytes
        if pieces.total_bytes < SMALL_WRITE * len(length):
            for first in range(0, len(length), BATCH):
                part = slice(first, first + BATCH)
                status = self.engine.batch_transfer_sync_write(
                    self.session, source[part], destination[part], length[part]
                )
                if status != 0:
                    raise RuntimeError(f"a batch of writes failed with status {status}")
            return
        waiting = zip(source, destination, length, strict=True)
        in_flight: list[int] = []
        left = len(length)
        while left or in_flight:
            while left and len(in_flight) < WINDOW:
                in_flight.append(self.engine.transfer_submit_write(self.session, *next(waiting)))
                left -= 1
            before = len(in_flight)
            states = [(write, self.engine.transfer_check_status(write)) for write in in_flight]
            if any(state < 0 for _, state in states):
                raise RuntimeError("a write failed")
            in_flight = [write for write, state in states if state == 0]
            if len(in_flight) == before and self.shape.transport == "tcp":
                time.sleep(0.0002)
