"""Staged parts: gathered from the pool of a prefill rank, written to the ring of a process, scattered into pages."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from pdserve.configs.schema import PrefillConfig
from pdserve.kernels.staging.kv_stage import kv_gather
from pdserve.memory.kv_pool import KvPool
from pdserve.memory.pages import pages_holding
from pdserve.transfer.data.chunk_writer import ChunkWriter
from pdserve.transfer.data.chunks import ChunkWrite, ChunkWritten, PartScatter, PartWrite, PartWritten
from pdserve.transfer.data.local_pool import LocalPool
from pdserve.transfer.data.part_scatterer import PartScatterer
from pdserve.transfer.data.part_writer import PartWriter
from pdserve.transfer.plan.staged_regions import StagedRegion, staged_regions
from pdserve.transfer.protocol.layout import KvLayout
from pdserve.transfer.protocol.messages import (
    PROTOCOL_VERSION,
    HeadSlice,
    Hello,
    InstanceId,
    Pool,
    Rank,
    StagePart,
    StageRing,
    TransferKey,
    Welcome,
)
from tests.transfer.data.kv_cells import empty_pool, kv_of, layout, put
from tests.transfer.data.kv_receiver import Receiver

LAYERS, HEADS, TOKENS = 3, 4, 50
DECODE = InstanceId("decode")
RING_BYTES = 64 << 10
POISON = 0xA5
SOURCE_PAGES, TARGET_PAGES = [3, 0, 1, 2], [6, 2, 7, 0, 5, 3, 1, 8]
HALF = layout((0, LAYERS), (2, 4), page_size=16, num_pages=5)
WHOLE = layout((0, LAYERS), (0, HEADS), page_size=7, num_pages=10)


class StagedRank:
    """Rank 1 of 2 of a prefill server, paired with a decode rank whose ring is the memory of `receiver`."""

    def __init__(self, receiver: Receiver, device: torch.device) -> None:
        self.cells = kv_of(LAYERS, HEADS, TOKENS, seed=5)
        self.receiver = receiver
        self.source = on_device(empty_pool(HALF), device)
        self.source.data.normal_()
        put(self.source, HALF, self.cells, SOURCE_PAGES, 0, TOKENS)
        self.chunks: queue.SimpleQueue[ChunkWritten] = queue.SimpleQueue()
        self.parts: queue.SimpleQueue[PartWritten] = queue.SimpleQueue()
        self.writer = ChunkWriter(
            1,
            [LocalPool(self.source, HALF)],
            PrefillConfig(),
            local_rank=0,
            on_written=self.chunks.put,
            on_part_written=self.parts.put,
        )
        ring = StageRing(receiver.base_address, RING_BYTES, epoch=4, memory="host")
        place = Rank(0, receiver.session, (Pool(WHOLE, 0, WHOLE.size_bytes),), ring=ring, staging="auto")
        hello = Hello(PROTOCOL_VERSION, DECODE, "m", "m", (place,))
        other = layout((0, LAYERS), (0, 2), page_size=16, num_pages=5)
        welcome = Welcome(PROTOCOL_VERSION, InstanceId("prefill"), "m", "m", (rank(0, other), rank(1, HALF)))
        self.region: StagedRegion = next(one for one in staged_regions(hello, welcome) if one.region.source == 1)
        self.pair = hello, welcome
        self.writer.open(hello, welcome)

    def part(self, start: int, end: int, key: TransferKey = TransferKey(1, 1)) -> StagePart:  # noqa: B008
        return StagePart(4, key, 1, 0, self.region.block, start, end)

    def command(self, part: StagePart, offset: int) -> PartWrite:
        pages, first = pages_holding(SOURCE_PAGES, HALF.page_size, part.token_start, part.token_end)
        return PartWrite(DECODE, part, offset, part.tokens * self.region.token_bytes, pages, first)

    def close(self) -> None:
        self.writer.close_all()
        assert self.parts.empty(), "a part was reported twice"
        assert self.chunks.empty(), "a chunk was reported twice"


def rank(number: int, kv: KvLayout) -> Rank:
    return Rank(number, None, (Pool(kv, 0, kv.size_bytes),), staging="auto")


def on_device(pool: KvPool, device: torch.device) -> KvPool:
    pool.data = pool.data.to(device)
    return pool


@pytest.fixture
def start_rank() -> Iterator[Callable[..., StagedRank]]:
    with ExitStack() as stack:

        def start(device: str = "cpu") -> StagedRank:
            receiver = stack.enter_context(Receiver(RING_BYTES))
            receiver.pool[:] = POISON
            started = StagedRank(receiver, torch.device(device))
            stack.callback(started.close)
            return started

        yield start


def test_each_part_is_one_write_and_is_scattered_into_its_pages(start_rank: Callable[..., StagedRank]) -> None:
    """More parts than buffers; page sizes differ. The rest of the ring and of the pool does not change."""
    prefill = start_rank()
    cuts = [3, 14, 15, 33, 50]
    parts = [prefill.part(start, end) for start, end in itertools.pairwise(cuts)]
    offsets = [index * (16 << 10) for index in range(len(parts))]
    for part, offset in zip(parts, offsets, strict=True):
        prefill.writer.write_part(prefill.command(part, offset))
    written = [prefill.parts.get(timeout=10) for _ in parts]
    assert [(one.part, one.ok, one.reason, one.late_writes, one.writes) for one in written] == [
        (part, True, "", False, 1) for part in parts
    ]
    assert [one.bytes_written for one in written] == [part.tokens * prefill.region.token_bytes for part in parts]
    used = {offset + byte for part, offset in zip(parts, offsets, strict=True) for byte in range(part.tokens * 384)}
    assert all(prefill.receiver.pool[byte] == POISON for byte in range(RING_BYTES) if byte not in used)

    target = empty_pool(WHOLE)
    target.data.fill_(-1)
    expected = target.data.clone()
    scattered: queue.SimpleQueue[StagePart] = queue.SimpleQueue()
    failures: list[str] = []
    ring = torch.from_numpy(prefill.receiver.pool)
    scatterer = PartScatterer(ring, target.data, WHOLE, on_scattered=scattered.put, on_failed=failures.append)
    for part, offset in zip(parts, offsets, strict=True):
        pages, first = pages_holding(TARGET_PAGES, WHOLE.page_size, part.token_start, part.token_end)
        scatterer.scatter(PartScatter(part, offset, part.tokens * prefill.region.token_bytes, pages, first))
    assert [scattered.get(timeout=10) for _ in parts] == parts
    scatterer.close()
    assert not failures
    for token in range(3, TOKENS):
        expected[TARGET_PAGES[token // 7], :, :, 2:4, token % 7] = prefill.cells[:, :, 2:4, token]
    assert target.data.equal(expected)


def test_next_part_is_gathered_while_the_previous_one_is_sent(
    start_rank: Callable[..., StagedRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts are in buffers, so their pages may be reused; the third waits for a buffer."""
    prefill = start_rank()
    gathered: list[int] = []

    def gather(*tensors: torch.Tensor, **where: Any) -> None:
        kv_gather(*tensors, **where)
        gathered.append(where["start"])

    monkeypatch.setattr("pdserve.transfer.data.part_writer.kv_gather", gather)
    prefill.writer.write_part(prefill.command(prefill.part(0, 1), 0))
    assert prefill.parts.get(timeout=10).ok
    prefill.receiver.stop()
    parts = [prefill.part(start, start + 4) for start in (2, 6, 10)]
    for part in parts:
        prefill.writer.write_part(prefill.command(part, 1024 * part.token_start))
    deadline = time.monotonic() + 10
    while len(gathered) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.1)
    assert gathered == [0, 2, 6], "the third has no buffer yet"
    assert prefill.parts.empty(), "nothing has been received"
    expected = [prefill.cells[:, :, 2:4, part.token_start : part.token_end].flatten() for part in parts]
    prefill.source.data[SOURCE_PAGES[0], :, :, :, :10] = 0  # the pages of the first two
    prefill.receiver.resume()
    for part, cells in zip(parts, expected, strict=True):
        assert prefill.parts.get(timeout=15).ok
        found = prefill.receiver.pool[1024 * part.token_start :][: 4 * prefill.region.token_bytes]
        assert torch.from_numpy(found.copy()).view(torch.float32).equal(cells)


@pytest.mark.gpu
def test_gpu_parts_do_not_wait_for_queued_steps(start_rank: Callable[..., StagedRank]) -> None:
    """Gathering and scattering have their own streams: a busy model does not delay them."""
    prefill = start_rank("cuda")
    target = on_device(empty_pool(WHOLE), torch.device("cuda"))
    ring = torch.zeros(RING_BYTES, dtype=torch.uint8, device="cuda")
    scattered: queue.SimpleQueue[StagePart] = queue.SimpleQueue()
    failures: list[str] = []
    scatterer = PartScatterer(ring, target.data, WHOLE, on_scattered=scattered.put, on_failed=failures.append)
    writer = prefill.writer._routes[DECODE].part_writers[0]
    part = prefill.part(3, 14)
    pages, first = pages_holding(TARGET_PAGES, WHOLE.page_size, part.token_start, part.token_end)
    scatter = PartScatter(part, 256, part.tokens * prefill.region.token_bytes, pages, first)
    steps = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # as in a rank's thread; scattering waits for the default stream
    for busy in (False, True):  # the first pass allocates memory, which waits for the device
        steps_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(steps):
            if busy:
                torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]  # cycles: a second
            steps_done.record()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # as the writer's thread
            wait = writer._gather(prefill.command(part, 0), slot=0)
        assert wait is not None
        wait()
        scatterer.scatter(scatter)
        assert scattered.get(timeout=10) == part
        assert steps_done.query() != busy, "gathering or scattering waited for the steps"  # type: ignore[no-untyped-call]
    scatterer.close()
    assert not failures
    slot = writer._buffers.slot(0, part.tokens * prefill.region.token_bytes)
    assert slot.view(torch.float32).cpu().equal(prefill.cells[:, :, 2:4, 3:14].flatten())


def test_chunk_of_staged_regions_ends_at_once_with_its_checksum(start_rank: Callable[..., StagedRank]) -> None:
    """A chunk command of staged regions writes nothing itself: its parts have their own commands."""
    prefill = start_rank()
    chunk = ChunkWrite(DECODE, TransferKey(1, 1), 0, TOKENS, SOURCE_PAGES, TARGET_PAGES)
    prefill.writer.write(chunk)
    plain = prefill.chunks.get(timeout=10)
    assert (plain.ok, plain.writes, plain.bytes_written, plain.checksums) == (True, 0, 0, ())
    prefill.writer.write(ChunkWrite(DECODE, TransferKey(1, 2), 0, TOKENS, SOURCE_PAGES, TARGET_PAGES, verify=True))
    verified = prefill.chunks.get(timeout=10)
    assert (verified.ok, verified.writes, verified.bytes_written, len(verified.checksums)) == (True, 0, 0, 1)
    assert verified.checksums != (0,)
    assert bool((prefill.receiver.pool == POISON).all())


def test_parts_for_a_stopped_peer_end_when_they_are_cancelled(start_rank: Callable[..., StagedRank]) -> None:
    """Two parts are in buffers. The three that wait for a buffer end at once; parts of another transfer are sent."""
    prefill = start_rank()
    prefill.writer.write_part(prefill.command(prefill.part(0, 1), 0))
    assert prefill.parts.get(timeout=10).ok
    prefill.receiver.stop()
    cancelled, other = TransferKey(2, 1), TransferKey(3, 1)
    for start in range(5):
        prefill.writer.write_part(prefill.command(prefill.part(start, start + 1, cancelled), 1024 * start))
    prefill.writer.write_part(prefill.command(prefill.part(9, 10, other), 9 * 1024))
    prefill.writer.cancel(DECODE, cancelled)
    at_once = [prefill.parts.get_nowait() for _ in range(3)]
    assert [(one.part.key, one.ok, one.reason) for one in at_once] == [(cancelled, False, "cancelled")] * 3
    prefill.receiver.resume()
    ended = [*at_once, *(prefill.parts.get(timeout=15) for _ in range(3))]
    assert sorted(one.part.token_start for one in ended) == [0, 1, 2, 3, 4, 9]
    assert [one.ok for one in ended if one.part.key == other] == [True]


def test_closing_reports_every_part(start_rank: Callable[..., StagedRank]) -> None:
    prefill = start_rank()
    prefill.receiver.stop()
    for start in range(6):
        prefill.writer.write_part(prefill.command(prefill.part(start, start + 1), 1024 * start))
    prefill.writer.close_all()
    ended = [prefill.parts.get(timeout=10) for _ in range(6)]
    assert not any(one.ok for one in ended)
    assert {one.part.token_start for one in ended} == set(range(6))
    prefill.writer.write_part(prefill.command(prefill.part(8, 9), 0))
    assert "gone" in prefill.parts.get(timeout=10).reason


def test_part_outside_the_ring_is_not_written(start_rank: Callable[..., StagedRank]) -> None:
    prefill = start_rank()
    prefill.writer.write_part(prefill.command(prefill.part(0, 8), RING_BYTES - 1024))
    ended = prefill.parts.get(timeout=10)
    assert not ended.ok
    assert not ended.late_writes
    assert bool((prefill.receiver.pool == POISON).all())


def test_failed_scatter_is_reported_and_stops_scattering() -> None:
    target = empty_pool(WHOLE)
    scattered: list[StagePart] = []
    failures: queue.SimpleQueue[str] = queue.SimpleQueue()
    ring = torch.zeros(RING_BYTES, dtype=torch.uint8)
    scatterer = PartScatterer(ring, target.data, WHOLE, on_scattered=scattered.append, on_failed=failures.put)
    part = StagePart(4, TransferKey(1, 1), 0, 0, HeadSlice(0, LAYERS, 0, 2), 0, 4)
    wrong_size = PartScatter(part, 0, size_bytes=100, pages=[0], start=0)
    scatterer.scatter(wrong_size)
    assert "scattering staged KV failed" in failures.get(timeout=10)
    scatterer.close()
    assert not scattered


def test_failed_open_leaves_no_thread_and_fails_writes_with_its_reason(
    start_rank: Callable[..., StagedRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = start_rank()
    prefill.writer.close_all()

    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory: 3 bytes asked for")

    before = threading.active_count()
    monkeypatch.setattr("pdserve.transfer.data.chunk_writer.PartWriter", no_memory)
    prefill.writer.open(*prefill.pair)
    assert threading.active_count() == before, "a thread of its senders is left"
    prefill.writer.write(ChunkWrite(DECODE, TransferKey(1, 1), 0, TOKENS, SOURCE_PAGES, TARGET_PAGES))
    prefill.writer.write_part(prefill.command(prefill.part(0, 1), 0))
    for ended in (prefill.chunks.get(timeout=10), prefill.parts.get(timeout=10)):
        assert not ended.ok
        assert "prefill rank 1 has no memory for staging buffers: out of memory: 3 bytes" in ended.reason
    monkeypatch.undo()
    prefill.writer.open(*prefill.pair)
    prefill.writer.write_part(prefill.command(prefill.part(0, 1), 0))
    assert prefill.parts.get(timeout=10).ok


def test_failure_of_a_cancelled_part_does_not_end_the_thread(
    start_rank: Callable[..., StagedRank], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU, a failed gather raises only when it is waited for."""
    prefill = start_rank()
    gathering, cancelled = threading.Event(), threading.Event()

    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    def gather(*_: object) -> Callable[[], None]:
        gathering.set()
        assert cancelled.wait(10)
        return fail

    with monkeypatch.context() as patched:
        patched.setattr(PartWriter, "_gather", gather)
        prefill.writer.write_part(prefill.command(prefill.part(0, 1), 0))
        assert gathering.wait(10)
        prefill.writer.cancel(DECODE, TransferKey(1, 1))
        cancelled.set()
        ended = prefill.parts.get(timeout=10)
    assert (ended.ok, ended.reason, ended.late_writes) == (False, "cancelled", False)
    assert "an illegal memory access" in caplog.text
    for start in range(3):  # more parts than buffers
        prefill.writer.write_part(prefill.command(prefill.part(start, start + 1, TransferKey(2, 1)), 0))
        assert prefill.parts.get(timeout=10).ok
