"""The staged path with real parts: pools, kernels, both state machines, and Mooncake into the memory of a process."""

import queue

import numpy as np
import torch

from pdserve.kernels.staging.kv_stage import kv_gather, kv_scatter
from pdserve.memory.kv_pool import KvPool
from pdserve.transfer.data.sender import PeerSender, PoolPair, SendJob, SendResult
from pdserve.transfer.mooncake.sockets import Region
from pdserve.transfer.mooncake.transports import KvRoute
from pdserve.transfer.plan.copy_runs import CopyRuns
from pdserve.transfer.plan.ring import StagingRing
from pdserve.transfer.protocol.layout import KvLayout, Plane
from pdserve.transfer.protocol.messages import (
    HeadSlice,
    InstanceId,
    Pool,
    StageArrived,
    StageFree,
    StageGrant,
    StagePart,
    StageRequest,
    TransferKey,
)
from pdserve.transfer.staging.receiver import (
    PagesQuiet,
    Post,
    ReceiverEffect,
    ScatterPart,
    StageReceiver,
    TransferLanded,
)
from pdserve.transfer.staging.sender import PeerRing, SenderEffect, StageSender, WritePart, split_tokens
from tests.transfer.data.kv_receiver import Receiver

LAYERS, HEADS, DIM, TOKENS = 3, 4, 16, 100
CELL_BYTES = 2 * DIM * 4  # key and value, float32
RING_BYTES = 32 << 10
KEY = TransferKey(1, 1)
PREFILL = InstanceId("prefill")


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
        self.blocks = [HeadSlice(0, LAYERS, 0, 2), HeadSlice(0, LAYERS, 2, 4)]
        self.sender = StageSender({0: PeerRing(5, RING_BYTES)})
        self.receiver = StageReceiver(0, StagingRing(RING_BYTES, epoch=5), cell_bytes=CELL_BYTES, quarantine_s=1.0)
        self.results: queue.Queue[SendResult] = queue.Queue()
        row = KvLayout((Plane("k", 1),), 0, 1, 0, 1, 1, RING_BYTES, "uint8")
        target = Pool(row, process.base_address, RING_BYTES, "host")
        self.peer = PeerSender(
            [KvRoute("tcp", process.session)],
            [PoolPair(Region(self.buffer.data_ptr(), RING_BYTES), target)],
            window=4,
            on_result=self.results.put,
        )
        self.writes: list[SendResult] = []
        self.landed = False

    def transfer(self, start: int) -> None:
        """Bring tokens [start, TOKENS) over, every message at once."""
        self.receiver.open(KEY, PREFILL, start, TOKENS, list(enumerate(self.blocks)))
        parts = []
        for writer, block in enumerate(self.blocks):
            for first, last in split_tokens(
                start, TOKENS, token_bytes=block.cells * CELL_BYTES, limit_bytes=RING_BYTES // 2
            ):
                parts.append(StagePart(5, KEY, writer, 0, block, first, last))
        for part in parts:
            self.prefill(self.sender.request(part, part.tokens * part.block.cells * CELL_BYTES, 0.0))
        for part in parts:
            self.prefill(self.sender.computed(part))

    def prefill(self, effects: list[SenderEffect]) -> None:
        for effect in effects:
            match effect:
                case StageRequest():
                    self.decode(self.receiver.requested(PREFILL, effect))
                case StageArrived():
                    self.decode(self.receiver.arrived(PREFILL, effect))
                case WritePart(part, offset, size_bytes):
                    kv_gather(
                        self.sources[part.writer].data,
                        torch.tensor(self.source_pages[part.writer]),
                        self.buffer[:size_bytes],
                        start=part.token_start,
                        end=part.token_end,
                        layers=range(LAYERS),
                        heads=range(2),
                    )
                    run = CopyRuns(*(np.array([number], dtype=np.int64) for number in (0, offset, size_bytes)))
                    self.peer.submit(SendJob(part.key, run))
                    self.writes.append(self.results.get(timeout=10))
                    assert self.writes[-1].ok, self.writes[-1].reason
                    self.prefill(self.sender.written(part, 0.0))
                case other:
                    raise AssertionError(other)

    def decode(self, effects: list[ReceiverEffect]) -> None:
        for effect in effects:
            match effect:
                case Post(_, StageGrant() as grant):
                    self.prefill(self.sender.granted(grant, 0.0))
                case Post(_, StageFree() as free):
                    self.prefill(self.sender.freed(free))
                case ScatterPart(part, region):
                    kv_scatter(
                        self.ring[region.offset :][: part.tokens * part.block.cells * CELL_BYTES],
                        self.target.data,
                        torch.tensor(self.target_pages),
                        start=part.token_start,
                        end=part.token_end,
                        layers=range(LAYERS),
                        heads=range(part.block.head_start, part.block.head_end),
                    )
                    self.decode(self.receiver.scattered(part))
                case TransferLanded():
                    self.landed = True
                    self.decode(self.receiver.close(KEY))
                case PagesQuiet():
                    pass
                case other:
                    raise AssertionError(other)


def test_two_ranks_to_one_through_a_ring_smaller_than_the_prompt() -> None:
    start = 3
    with Receiver(RING_BYTES) as process:
        pair = StagedPair(process)
        before = pair.target.data.clone()
        pair.transfer(start)
        pair.peer.close()
        assert process.stderr() == ""
    assert pair.landed
    assert pair.sender.idle
    assert pair.receiver.idle
    # 97 tokens x 3 layers x 2 heads x 128 bytes a rank, in parts of at most 16 KiB: 5 parts, one write each
    assert len(pair.writes) == 2 * 5
    assert sum(write.writes for write in pair.writes) == 2 * 5
    assert sum(write.bytes_written for write in pair.writes) == (TOKENS - start) * LAYERS * HEADS * CELL_BYTES
    found = pair.target.read_tokens(pair.target_pages, start, TOKENS)
    assert found.equal(pair.values[:, :, :, start:])
    for token in range(start, TOKENS):
        page, slot = pair.target_pages[token // 7], token % 7
        before[page, :, :, :, slot] = pair.target.data[page, :, :, :, slot]
    assert pair.target.data.equal(before)
