"""ChunkWriter writes chunks over real Mooncake engines to real processes, and reports each exactly once."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest
import torch

from pdserve.configs.schema import PrefillConfig
from pdserve.transfer.data import chunk_writer as chunk_writer_module
from pdserve.transfer.data.chunk_writer import ChunkWriter
from pdserve.transfer.data.chunks import ChunkWrite, ChunkWritten
from pdserve.transfer.data.local_pool import LocalPool
from pdserve.transfer.data.sender import STALL_BASE_S
from pdserve.transfer.plan.pairing import check_pair
from pdserve.transfer.protocol.checksum import add_sums, block_sum
from pdserve.transfer.protocol.layout import KvLayout
from pdserve.transfer.protocol.messages import PROTOCOL_VERSION, Hello, InstanceId, Pool, Rank, TransferKey, Welcome
from tests.transfer.data.kv_cells import empty_pool, filled_pool, kv_of, layout, planes_of, put, view_of
from tests.transfer.data.kv_receiver import Receiver
from tests.transfer.data.kv_writer import Setup, WriterProcess

LAYERS, HEADS = 3, 4
DECODE = InstanceId("decode")
POISON = 0xA5
MIB = 1 << 20


@pytest.fixture
def start_receiver() -> Iterator[Callable[[int], Receiver]]:
    """Starts decode ranks; their memory is poisoned."""
    with ExitStack() as stack:

        def start(size_bytes: int) -> Receiver:
            receiver = stack.enter_context(Receiver(size_bytes))
            receiver.pool[:] = POISON
            return receiver

        yield start


@pytest.fixture
def start_writer() -> Iterator[Callable[..., "Harness"]]:
    with ExitStack() as stack:

        def start(*arguments: object, **options: object) -> Harness:
            harness = Harness(*arguments, **options)  # type: ignore[arg-type]
            stack.callback(harness.close)
            return harness

        yield start


@pytest.fixture
def start_process() -> Iterator[Callable[[Setup], WriterProcess]]:
    """Starts prefill ranks in processes of their own."""
    with ExitStack() as stack:

        def start(setup: Setup) -> WriterProcess:
            process = WriterProcess(setup)
            stack.callback(process.kill)
            return process

        yield start


class Harness:
    """A prefill rank in this process, paired with `hello`, and its reports."""

    def __init__(self, rank: int, pools: Sequence[LocalPool], hello: Hello, welcome: Welcome, window: int = 16) -> None:
        self.reports: queue.SimpleQueue[ChunkWritten] = queue.SimpleQueue()
        config = PrefillConfig(send_window=window)
        self.writer = ChunkWriter(rank, pools, config, local_rank=0, on_written=self.reports.put)
        assert check_pair(hello, welcome) is None
        self.writer.open(hello, welcome)

    def report(self, timeout_s: float = 10.0) -> ChunkWritten:
        return self.reports.get(timeout=timeout_s)

    def close(self) -> None:
        self.writer.close_all()
        assert self.reports.empty(), "a chunk was reported twice"


def hello_of(*ranks: tuple[Receiver, KvLayout]) -> Hello:
    places = (
        Rank(number, receiver.session, (Pool(kv, receiver.base_address, kv.size_bytes),))
        for number, (receiver, kv) in enumerate(ranks)
    )
    return Hello(PROTOCOL_VERSION, DECODE, "model", "model", tuple(places))


def welcome_of(*layouts: KvLayout | tuple[KvLayout, ...]) -> Welcome:
    places = []
    for number, held in enumerate(layouts):
        pools = held if isinstance(held, tuple) else (held,)
        places.append(Rank(number, None, tuple(Pool(kv, 0, kv.size_bytes) for kv in pools)))
    return Welcome(PROTOCOL_VERSION, InstanceId("prefill"), "model", "model", tuple(places))


def chunk_write(start: int, end: int, source: Sequence[int], indices: Sequence[int], **options: object) -> ChunkWrite:
    chunk = ChunkWrite(DECODE, TransferKey(1, 0), start, end, list(source), list(indices))
    return msgspec.structs.replace(chunk, **options)


def threads(prefix: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {timeout_s} s"
        time.sleep(0.0005)


def test_two_prefill_ranks_fill_one_decode_rank(
    start_receiver: Callable[[int], Receiver], start_process: Callable[[Setup], WriterProcess]
) -> None:
    tokens, pages, to_pages = 64, [5, 2, 3, 0], [1, 2, 6, 4]
    halves = [layout((0, LAYERS), heads, page_size=16, num_pages=8) for heads in ((0, 2), (2, 4))]
    whole = layout((0, LAYERS), (0, HEADS), page_size=16, num_pages=8)
    receiver = start_receiver(whole.size_bytes)
    hello, welcome = hello_of((receiver, whole)), welcome_of(*halves)
    writers = [start_process(Setup(rank, hello, welcome, (LAYERS, HEADS, tokens), 7, pages)) for rank in range(2)]
    chunk = chunk_write(0, tokens, pages, to_pages, verify=True)
    for writer in writers:
        writer.submit(chunk)
    reports = [writer.report() for writer in writers]
    assert [writer.close() for writer in writers] == [0, 0]
    for report, half in zip(reports, halves, strict=True):
        assert (report.ok, report.reason, report.late_writes) == (True, "", False)
        assert report.writes == 2 * LAYERS * len(pages), "a write per plane, layer and page"
        assert report.bytes_written == len(pages) * half.page_bytes
        assert (report.instance, report.key, report.token_start, report.token_end) == (DECODE, chunk.key, 0, tokens)
    expected = empty_pool(whole)
    expected.data.view(torch.uint8).fill_(POISON)
    put(expected, whole, kv_of(LAYERS, HEADS, tokens, seed=7), to_pages, 0, tokens)
    received = view_of(receiver.pool, whole)
    assert torch.equal(received.data.view(torch.int32), expected.data.view(torch.int32))
    assert add_sums(report.checksums[0] for report in reports) == block_sum(
        received.read_tokens(to_pages, 0, tokens), whole
    )


def test_prefill_rank_continues_its_chunk_after_a_stop(
    start_receiver: Callable[[int], Receiver], start_process: Callable[[Setup], WriterProcess]
) -> None:
    """Time in which the prefill rank itself is stopped does not count as a stall of the decode rank."""
    tokens, pages, to_pages = 64, [5, 2, 3, 0], [1, 2, 6, 4]
    whole = layout((0, LAYERS), (0, HEADS), page_size=16, num_pages=8)
    receiver = start_receiver(whole.size_bytes)
    hello, welcome = hello_of((receiver, whole)), welcome_of(whole)
    writer = start_process(Setup(0, hello, welcome, (LAYERS, HEADS, tokens), 7, pages))
    chunk = chunk_write(0, tokens, pages, to_pages)
    writer.submit(chunk)
    assert writer.report().ok, "it has connected"
    receiver.pool[:] = POISON
    receiver.stop()
    writer.submit(chunk)
    time.sleep(0.1)
    writer.stop()
    time.sleep(STALL_BASE_S + 0.5)
    assert (receiver.pool == POISON).all(), "nothing has arrived yet"
    writer.resume()
    time.sleep(0.1)  # long enough for a stall check without progress
    receiver.resume()
    report = writer.report()
    assert (report.ok, report.reason, report.late_writes) == (True, "", False)
    assert writer.close() == 0
    received = view_of(receiver.pool, whole)
    expected = empty_pool(whole)
    expected.data.view(torch.uint8).fill_(POISON)
    put(expected, whole, kv_of(LAYERS, HEADS, tokens, seed=7), to_pages, 0, tokens)
    assert torch.equal(received.data.view(torch.int32), expected.data.view(torch.int32))


def test_one_prefill_rank_serves_two_decode_ranks_in_chunks_between_unequal_pages(
    start_receiver: Callable[[int], Receiver], start_writer: Callable[..., Harness]
) -> None:
    tokens, prefix, pages = 50, 12, [3, 0, 1, 2]
    cells = kv_of(LAYERS, HEADS, tokens, seed=3)
    whole = layout((0, LAYERS), (0, HEADS), page_size=16, num_pages=5)
    shards = [layout((0, LAYERS), heads, page_size=6, num_pages=12) for heads in ((0, 1), (1, 4))]
    receivers = [start_receiver(kv.size_bytes) for kv in shards]
    harness = start_writer(
        0, [filled_pool(whole, cells, pages)], hello_of(*zip(receivers, shards, strict=True)), welcome_of(whole)
    )
    to_pages = [9, 4, 11, 0, 3, 7, 2]  # from token 12 on: decode has the prefix already
    chunks = [(prefix, 16), (16, 48), (48, 50)]
    for start, end in chunks:
        indices = to_pages[(start - prefix) // 6 :]
        harness.writer.write(chunk_write(start, end, pages[start // 16 :], indices, verify=True))
    reports = [harness.report() for _ in chunks]
    assert all(report.ok for report in reports)
    assert [(report.token_start, report.token_end) for report in reports] == chunks
    assert [report.bytes_written for report in reports] == [(end - start) * whole.token_bytes for start, end in chunks]
    absolute = [8, 8, *to_pages]  # the pages of the prefix are not written
    for number, (receiver, kv) in enumerate(zip(receivers, shards, strict=True)):
        expected = empty_pool(kv)
        expected.data.view(torch.uint8).fill_(POISON)
        put(expected, kv, cells, absolute, prefix, tokens)
        received = view_of(receiver.pool, kv)
        assert torch.equal(received.data.view(torch.int32), expected.data.view(torch.int32))
        for report, (start, end) in zip(reports, chunks, strict=True):
            assert report.checksums[number] == block_sum(received.read_tokens(absolute, start, end), kv)


def test_pools_in_host_and_device_memory_have_the_same_page_ids_and_one_sender(
    start_receiver: Callable[[int], Receiver], start_writer: Callable[..., Harness]
) -> None:
    tokens, pages = 40, [1, 0, 3]
    cells = {name: kv_of(LAYERS, 1, tokens, seed=seed, planes=1) for seed, name in enumerate(("latent", "indexer"))}
    held = {
        name: layout((0, LAYERS), (0, 1), page_size=16, num_pages=4, planes=(name,)) for name in ("latent", "indexer")
    }
    indexer = layout((0, LAYERS), (0, 1), page_size=8, num_pages=10, planes=("indexer",))
    latent = layout((0, LAYERS), (0, 1), page_size=8, num_pages=10, planes=("latent",))
    receiver = start_receiver(indexer.size_bytes + latent.size_bytes)
    pools = (
        Pool(indexer, receiver.base_address, indexer.size_bytes),
        Pool(latent, receiver.base_address + indexer.size_bytes, latent.size_bytes, memory="host"),
    )
    hello = Hello(PROTOCOL_VERSION, DECODE, "model", "model", (Rank(0, receiver.session, pools),))
    sources = [filled_pool(held[name], cells[name], pages) for name in ("latent", "indexer")]
    harness = start_writer(0, sources, hello, welcome_of(tuple(held.values())))
    assert threads("send-") == [f"send-{receiver.session}"]
    to_pages = [4, 5, 6, 9, 1]
    harness.writer.write(chunk_write(0, tokens, pages, to_pages, verify=True))
    report = harness.report()
    assert report.ok
    landed = {
        "indexer": (view_of(receiver.pool, indexer), indexer),
        "latent": (view_of(receiver.pool[indexer.size_bytes :], latent), latent),
    }
    for name, (received, kv) in landed.items():
        (found,), (expected,) = received.read_tokens(to_pages, 0, tokens), planes_of(cells[name])
        assert found.equal(expected), name
        assert (
            received.data[[page for page in range(kv.num_pages) if page not in to_pages]].view(torch.uint8) == POISON
        ).all()
    assert report.checksums == (
        add_sums(block_sum(pool.read_tokens(to_pages, 0, tokens), kv) for pool, kv in landed.values()),
    )


def test_one_of_three_replicas_writes_and_all_report(
    start_receiver: Callable[[int], Receiver], start_writer: Callable[..., Harness]
) -> None:
    kv = layout((0, LAYERS), (0, 1), page_size=16, num_pages=4, planes=("latent",))
    cells = kv_of(LAYERS, 1, 16, seed=1, planes=1)
    receiver = start_receiver(kv.size_bytes)
    harnesses = [
        start_writer(rank, [filled_pool(kv, cells, [0])], hello_of((receiver, kv)), welcome_of(kv, kv, kv))
        for rank in range(3)
    ]
    for harness in harnesses:
        harness.writer.write(chunk_write(0, 16, [0], [2], verify=True))
    reports = [harness.report() for harness in harnesses]
    assert all(report.ok for report in reports)
    assert sorted(report.writes for report in reports) == [0, 0, 1]
    assert sorted(report.bytes_written for report in reports) == [0, 0, kv.page_bytes]
    received = view_of(receiver.pool, kv).read_tokens([2], 0, 16)
    assert all(found.equal(expected) for found, expected in zip(received, planes_of(cells), strict=True))
    assert add_sums(report.checksums[0] for report in reports) == block_sum(received, kv)


def large_pair(
    start_receiver: Callable[[int], Receiver], start_writer: Callable[..., Harness]
) -> tuple[Harness, list[Receiver], ChunkWrite]:
    """A rank and a chunk of 128 MiB for each of two decode ranks, all from one page, in pieces of 16 KiB."""
    whole = layout((0, 2), (0, 2), page_size=16, num_pages=1, dim=256)
    shards = [layout((0, 2), heads, page_size=16, num_pages=2048, dim=256) for heads in ((0, 1), (1, 2))]
    receivers = [start_receiver(kv.size_bytes) for kv in shards]
    source = empty_pool(whole)
    source.data.fill_(1.0)
    harness = start_writer(
        0, [LocalPool(source, whole)], hello_of(*zip(receivers, shards, strict=True)), welcome_of(whole)
    )
    return harness, receivers, chunk_write(0, 16 * 2048, [0] * 2048, list(range(2048)))


def arrived_bytes(receiver: Receiver) -> int:
    return int(np.count_nonzero(receiver.pool.view(np.float32) == 1.0)) * 4


def test_cancelling_stops_all_regions_and_reports_once(
    start_receiver: Callable[[int], Receiver], start_writer: Callable[..., Harness]
) -> None:
    harness, receivers, chunk = large_pair(start_receiver, start_writer)
    harness.writer.write(chunk)
    wait_until(lambda: receivers[0].pool[MIB] != POISON)
    harness.writer.cancel(DECODE, chunk.key)
    report = harness.report()
    assert (report.key, report.ok, report.reason, report.late_writes) == (chunk.key, False, "cancelled", False)
    assert 0 < report.bytes_written < sum(receiver.size_bytes for receiver in receivers)
    assert report.bytes_written == sum(arrived_bytes(receiver) for receiver in receivers)
    assert report.checksums == ()
    other = msgspec.structs.replace(chunk, key=TransferKey(2, 0), token_end=16)
    harness.writer.write(other)
    report = harness.report()
    assert (report.key, report.ok) == (other.key, True)


def test_a_decode_rank_killed_in_the_middle_stops_the_chunk_on_the_others(
    start_receiver: Callable[[int], Receiver], start_writer: Callable[..., Harness]
) -> None:
    harness, receivers, chunk = large_pair(start_receiver, start_writer)
    later = msgspec.structs.replace(chunk, key=TransferKey(2, 0), token_end=16)
    harness.writer.write(chunk)
    wait_until(lambda: receivers[0].pool[MIB] != POISON)
    receivers[0].kill()
    killed_at = time.monotonic()
    report = harness.report()
    assert time.monotonic() - killed_at < 3
    assert (report.ok, report.late_writes) == (False, True)
    assert receivers[0].session in report.reason
    assert arrived_bytes(receivers[1]) < receivers[1].size_bytes, "the chunk was not stopped on the healthy rank"
    harness.writer.write(later)
    report = harness.report()
    assert (report.key, report.ok, report.late_writes) == (later.key, False, False)
    assert "refuses connections" in report.reason


def test_closing_does_not_wait_for_a_hung_peer_and_reports_running_chunks(
    start_receiver: Callable[[int], Receiver], start_writer: Callable[..., Harness]
) -> None:
    harness, receivers, chunk = large_pair(start_receiver, start_writer)
    harness.writer.write(chunk)
    wait_until(lambda: receivers[1].pool[MIB] != POISON)
    receivers[1].stop()
    started = time.monotonic()
    harness.writer.close(DECODE)
    assert time.monotonic() - started < 0.5  # waiting for the peer would take a second
    harness.writer.write(chunk)
    gone, report = harness.report(), harness.report()
    assert (gone.ok, gone.reason, gone.writes) == (False, "the decode server is gone", 0)
    assert (report.ok, report.late_writes) == (False, True)
    harness.writer.close(DECODE)
    harness.writer.close_all()
    assert threads("send-") == threads("close-") == []


def test_repeated_hello_changes_nothing_and_a_closed_peer_can_return(
    start_receiver: Callable[[int], Receiver], start_writer: Callable[..., Harness]
) -> None:
    kv = layout((0, LAYERS), (0, HEADS), page_size=16, num_pages=4)
    receiver = start_receiver(kv.size_bytes)
    hello, welcome = hello_of((receiver, kv)), welcome_of(kv)
    harness = start_writer(0, [filled_pool(kv, kv_of(LAYERS, HEADS, 16, seed=1), [0])], hello, welcome)
    harness.writer.open(hello, welcome)
    assert len(threads("send-")) == 1
    harness.writer.close(DECODE)
    harness.writer.open(hello, welcome)
    harness.writer.write(chunk_write(0, 16, [0], [2]))
    report = harness.report()
    assert (report.ok, report.writes, report.bytes_written) == (True, 1, kv.page_bytes)


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (chunk_write(0, 16, [0], [4]), "exceeds the destination pool"),
        (chunk_write(0, 16, [0], [-1]), "exceeds the destination pool"),
        (chunk_write(0, 16, [4], [0]), "exceeds the source pool"),
        (chunk_write(0, 17, [0, 1], [0]), "destination_pages has shape (1,), these tokens need 2 entries"),
        (chunk_write(0, 16, [0], []), "destination_pages has shape (0,), these tokens need 1 entries"),
    ],
)
def test_invalid_chunk_fails_before_anything_is_written(
    chunk: ChunkWrite,
    reason: str,
    start_receiver: Callable[[int], Receiver],
    start_writer: Callable[..., Harness],
) -> None:
    kv = layout((0, LAYERS), (0, HEADS), page_size=16, num_pages=4)
    shards = [layout((0, LAYERS), heads, page_size=16, num_pages=4) for heads in ((0, 2), (2, 4))]
    receivers = [start_receiver(shard.size_bytes) for shard in shards]
    source = filled_pool(kv, kv_of(LAYERS, HEADS, 16, seed=1), [0])
    harness = start_writer(0, [source], hello_of(*zip(receivers, shards, strict=True)), welcome_of(kv))
    harness.writer.write(chunk)
    report = harness.report()
    assert (report.ok, report.writes, report.late_writes) == (False, 0, False)
    assert reason in report.reason
    assert all((receiver.pool == POISON).all() for receiver in receivers)


def test_failed_step_fails_its_chunk_and_slow_step_is_reported_as_a_problem(
    start_receiver: Callable[[int], Receiver],
    start_writer: Callable[..., Harness],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kv = layout((0, LAYERS), (0, HEADS), page_size=16, num_pages=4)
    shards = [layout((0, LAYERS), heads, page_size=16, num_pages=4) for heads in ((0, 2), (2, 4))]
    receivers = [start_receiver(shard.size_bytes) for shard in shards]
    source = filled_pool(kv, kv_of(LAYERS, HEADS, 16, seed=1), [0])
    harness = start_writer(0, [source], hello_of(*zip(receivers, shards, strict=True)), welcome_of(kv))
    computed = threading.Event()

    def ready() -> None:
        assert computed.wait(10)
        raise RuntimeError("the step failed")

    monkeypatch.setattr(chunk_writer_module, "SLOW_KV_S", 0.05)
    assert harness.writer.problems() == []
    harness.writer.write(chunk_write(0, 16, [0], [1]), ready)
    wait_until(lambda: len(harness.writer.problems()) == 2)
    assert {receiver.session for receiver in receivers} == {text.split()[3] for text in harness.writer.problems()}
    computed.set()
    report = harness.report()
    assert (report.ok, report.writes, report.late_writes) == (False, 0, False)
    assert "the step failed" in report.reason
    harness.writer.write(chunk_write(0, 16, [0], [1]))
    assert harness.report().ok
    assert harness.writer.problems() == []
