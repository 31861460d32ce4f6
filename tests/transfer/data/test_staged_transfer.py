"""A staged transfer with real pools, kernels and state machines of both sides, and Mooncake to another process."""

import collections
import queue

import numpy as np
import torch

from pdserve.kernels.staging.kv_stage import kv_gather, kv_scatter
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.kv_pool import KvPool
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.decode.memory.holds import Holds
from pdserve.scheduler.decode.rooms.staging import RankRing, StagedArrivals
from pdserve.scheduler.messages.effects import Effect, SendToPeer
from pdserve.scheduler.prefill.staging import StagedSends
from pdserve.transfer.data.chunks import ChunkWrite, PartScatter, PartWrite, PartWritten
from pdserve.transfer.data.routed_engine import PoolPair
from pdserve.transfer.data.sender import PeerSender, SendJob, SendResult
from pdserve.transfer.mooncake.sockets import Region
from pdserve.transfer.mooncake.transports import KvRoute
from pdserve.transfer.plan.copy_regions import CopyRegion
from pdserve.transfer.plan.copy_runs import CopyRuns
from pdserve.transfer.plan.ring import StagingRing
from pdserve.transfer.plan.staged_regions import StagedRegion
from pdserve.transfer.protocol.layout import KvLayout, Plane
from pdserve.transfer.protocol.messages import (
    InstanceId,
    Pool,
    StageArrived,
    StageFree,
    StageGrant,
    StageRequest,
    StageRing,
    StageStopped,
    TransferKey,
)
from tests.transfer.data.kv_cells import planes_of
from tests.transfer.data.kv_receiver import Receiver

LAYERS, HEADS, DIM, TOKENS = 3, 4, 16, 100
CELL_BYTES = 2 * DIM * 4  # key and value, float32
RING_BYTES = 32 << 10
KEY = TransferKey(1, 1)
PREFILL, DECODE = InstanceId("prefill"), InstanceId("decode")


def pool_of(heads: int, page_size: int) -> KvPool:
    return KvPool(
        num_pages=-(-TOKENS // page_size) + 3,
        num_layers=LAYERS,
        num_heads=heads,
        page_size=page_size,
        head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def pages_of(pool: KvPool, seed: int) -> list[int]:
    order = np.random.default_rng(seed).permutation(pool.num_pages)[: -(-TOKENS // pool.page_size)]
    return [int(page) for page in order]


class StagedPair:
    """Prefill with two ranks of two heads and pages of 16; decode with one rank of four heads and pages of 7."""

    def __init__(self, process: Receiver) -> None:
        self.values = torch.randn(LAYERS, 2, HEADS, TOKENS, DIM)
        self.sources = [pool_of(2, 16), pool_of(2, 16)]
        self.source_pages = [pages_of(pool, seed) for seed, pool in enumerate(self.sources)]
        for rank, (pool, pages) in enumerate(zip(self.sources, self.source_pages, strict=True)):
            for token in range(TOKENS):
                mine = self.values[:, :, 2 * rank : 2 * rank + 2, token]
                pool.data[pages[token // 16], :, :, :, token % 16] = mine
        self.target = pool_of(HEADS, 7)
        self.target.data.fill_(7.5)
        self.target_pages = pages_of(self.target, 9)
        self.ring = torch.from_numpy(process.pool)
        self.buffer = torch.zeros(RING_BYTES, dtype=torch.uint8)
        ring = StageRing(process.base_address, RING_BYTES, epoch=5)
        regions = [
            StagedRegion(CopyRegion(rank, 0, range(LAYERS), heads), ring, LAYERS * 2 * CELL_BYTES, RING_BYTES // 2)
            for rank, heads in enumerate([range(2), range(2, 4)])
        ]
        self.effects: list[Effect] = []
        counters: collections.Counter[str] = collections.Counter()
        self.sends = StagedSends(16, counters, self.effects)
        self.sends.regions[DECODE] = regions
        rings = [RankRing(StagingRing(RING_BYTES), CELL_BYTES)]
        allocator = PageAllocator[KvPage](self.target.num_pages)
        allocator.grant("all, so that a transfer can share them", self.target.num_pages)
        grant = allocator.grant("prompt", 0, shared=[KvPage(page) for page in self.target_pages])
        assert grant is not None
        self.grant = grant
        self.arrivals = StagedArrivals(rings, 7, 1.0, counters, self.effects, Holds(allocator))
        self.arrivals.peer_up(PREFILL, regions)
        self.results: queue.Queue[SendResult] = queue.Queue()
        row = KvLayout((Plane("k", 1),), 0, 1, 0, 1, 1, RING_BYTES, "uint8")
        target = Pool(row, process.base_address, RING_BYTES, "host")
        self.pools = PoolPair(Region(self.buffer.data_ptr(), RING_BYTES), target)
        self.peer = PeerSender(
            [KvRoute("tcp", process.session)],
            [self.pools],
            window=4,
        )
        self.writes: list[SendResult] = []
        self.landed = False

    def transfer(self, start: int) -> None:
        """Transfer tokens [start, TOKENS); every message is delivered at once."""
        self.arrivals.open(KEY, PREFILL, start, TOKENS, self.grant)
        assert self.arrivals.misses(KEY)
        self.sends.request((DECODE, KEY), start, TOKENS)
        # on a real server all ranks have the same page ids; here they are indices, which act() maps to ids of a rank
        self.sends.send(ChunkWrite(DECODE, KEY, start, TOKENS, list(range(len(self.source_pages[0]))), []))
        while self.effects:
            self.act(self.effects.pop(0))

    def act(self, effect: Effect) -> None:
        match effect:
            case SendToPeer(message=StageRequest() | StageArrived() | StageStopped() as message):
                assert self.arrivals.receive(PREFILL, message, 0.0) is None
            case SendToPeer(message=StageGrant() as message):
                assert self.sends.granted(DECODE, message) is None
            case SendToPeer(message=StageFree()):
                pass
            case PartWrite(part=part, offset=offset, size_bytes=size_bytes):
                kv_gather(
                    self.sources[part.writer].data,
                    torch.tensor([self.source_pages[part.writer][page] for page in effect.pages]),
                    self.buffer[:size_bytes],
                    start=effect.start,
                    end=effect.start + part.tokens,
                    layers=range(LAYERS),
                    heads=range(2),
                )
                run = CopyRuns(*(np.array([number], dtype=np.int64) for number in (0, offset, size_bytes)))
                self.peer.submit(SendJob(part.key, run, self.pools, self.results.put))
                self.writes.append(self.results.get(timeout=10))
                assert self.writes[-1].ok, self.writes[-1].reason
                self.sends.part_written(PartWritten(DECODE, part, ok=True))
            case PartScatter(part=part, offset=offset, size_bytes=size_bytes):
                kv_scatter(
                    self.ring[offset:][:size_bytes],
                    self.target.data,
                    torch.tensor(effect.pages),
                    start=effect.start,
                    end=effect.start + part.tokens,
                    layers=range(LAYERS),
                    heads=range(part.block.head_start, part.block.head_end),
                )
                self.arrivals.scattered(part)
                if not self.arrivals.misses(KEY):
                    self.landed = True
                    self.arrivals.close(KEY)
            case other:
                raise AssertionError(other)


def test_two_ranks_stage_to_one_through_a_ring_smaller_than_the_prompt() -> None:
    start = 7  # decode has a cached prefix of one page
    with Receiver(RING_BYTES) as process:
        pair = StagedPair(process)
        before = pair.target.data.clone()
        pair.transfer(start)
        pair.peer.close()
        assert process.stderr() == ""
    assert pair.landed
    assert pair.sends.parts == 0
    pair.arrivals.check_integrity(idle=True)
    # 93 tokens x 3 layers x 2 heads x 128 bytes a rank, in parts of at most 16 KiB: 5 parts, one write each
    assert len(pair.writes) == 2 * 5
    assert sum(write.writes for write in pair.writes) == 2 * 5
    assert sum(write.bytes_written for write in pair.writes) == (TOKENS - start) * LAYERS * HEADS * CELL_BYTES
    found = pair.target.read_tokens(pair.target_pages, start, TOKENS)
    for plane, expected in zip(found, planes_of(pair.values[:, :, :, start:]), strict=True):
        assert plane.equal(expected)
    for token in range(start, TOKENS):
        page, slot = pair.target_pages[token // 7], token % 7
        before[page, :, :, :, slot] = pair.target.data[page, :, :, :, slot]
    assert pair.target.data.equal(before)
