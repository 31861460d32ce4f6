"""PeerSender with a real receiving process: each job has one result, in bounded time, whatever the peer does."""

import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pdserve.transfer.data import sender as sender_module
from pdserve.transfer.data.routed_engine import PoolPair
from pdserve.transfer.data.sender import PeerSender, SendJob, SendResult
from pdserve.transfer.mooncake.engine import SendEngine
from pdserve.transfer.mooncake.sockets import Region
from pdserve.transfer.mooncake.transports import KvRoute
from pdserve.transfer.plan.copy_runs import CopyRuns, PlanError
from pdserve.transfer.protocol.layout import KvLayout, Plane
from pdserve.transfer.protocol.messages import Pool, TransferKey
from tests.transfer.data.kv_receiver import Receiver
from tests.transfer.mooncake.mooncake_proxy import MooncakeProxy

MIB = 1 << 20
POOL_BYTES = 256 * MIB


@pytest.fixture(autouse=True)
def nothing_on_stderr() -> Iterator[None]:
    """File descriptor 2 stays empty: Mooncake's C++ log bypasses Python's sys.stderr."""
    with tempfile.TemporaryFile() as captured:
        original = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(original, 2)
            os.close(original)
        captured.seek(0)
        assert captured.read() == b""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver(POOL_BYTES) as process:
        yield process
        assert process.stderr() == ""


class Harness:
    """A source buffer of random bytes (never 0) and a sender from it to `receiver`."""

    def __init__(self, receiver: Receiver, *, size_bytes: int = 8 * MIB, window: int = 8) -> None:
        self.source = np.random.default_rng(1).integers(1, 256, size_bytes, dtype=np.uint8)
        self.receiver = receiver
        self.results: queue.Queue[SendResult] = queue.Queue()
        row = KvLayout((Plane("k", 1),), 0, 1, 0, 1, 1, receiver.size_bytes, "uint8")
        target = Pool(row, receiver.base_address, receiver.size_bytes, "host")
        self.pools = PoolPair(Region(self.source.ctypes.data, self.source.nbytes), target)
        self.sender = PeerSender(
            [KvRoute("tcp", receiver.session)],
            [self.pools],
            window=window,
        )

    def submit(self, key: TransferKey, runs: CopyRuns, ready: Callable[[], None] | None = None) -> None:
        self.sender.submit(SendJob(key, runs, self.pools, self.results.put, ready))

    def result(self, timeout_s: float = 10.0) -> SendResult:
        return self.results.get(timeout=timeout_s)

    def close(self) -> None:
        self.sender.close()
        assert self.results.empty(), "unexpected result"


@pytest.fixture
def harness(receiver: Receiver) -> Iterator[Harness]:
    made = Harness(receiver)
    yield made
    made.close()


def key(number: int) -> TransferKey:
    return TransferKey(number, 1)


def copies(source: object, destination: object, length: object) -> CopyRuns:
    return CopyRuns(*(np.array(column, dtype=np.int64) for column in (source, destination, length)))


def fill(size_bytes: int, total_bytes: int) -> CopyRuns:
    """Copy the first `size_bytes` of the source over and over until `total_bytes` of the destination are full."""
    starts = np.arange(0, total_bytes, size_bytes, dtype=np.int64)
    return CopyRuns(np.zeros_like(starts), starts, np.full_like(starts, size_bytes))


def wait_until(condition: object, timeout_s: float = 10.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {timeout_s} s"
        time.sleep(0.0005)


def test_scattered_runs_land_exactly(harness: Harness) -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 20_000, 300)
    from_starts = rng.permutation(np.cumsum(lengths) - lengths)
    gaps = lengths + rng.integers(0, 50, 300)
    to_starts = np.cumsum(gaps) - gaps
    lengths = np.minimum(lengths, harness.source.nbytes - from_starts)
    harness.submit(key(1), copies(from_starts, to_starts, lengths))
    result = harness.result()
    assert (result.ok, result.reason, result.late_writes, result.writes) == (True, "", False, 300)
    assert result.bytes_written == lengths.sum()
    expected = np.zeros(POOL_BYTES, dtype=np.uint8)
    for source, destination, length in zip(from_starts, to_starts, lengths, strict=True):
        expected[destination : destination + length] = harness.source[source : source + length]
    assert (harness.receiver.pool == expected).all()


def test_long_run_is_split_and_5000_short_runs_are_written(harness: Harness) -> None:
    short = np.arange(5000, dtype=np.int64)
    harness.submit(key(1), copies([0], [0], [8 * MIB]))
    harness.submit(key(2), copies(short * 512, 16 * MIB + short * 1024, np.full(5000, 512)))
    long_result, short_result = harness.result(), harness.result(30)
    assert long_result.ok
    assert long_result.writes == 8 * MIB // sender_module.MAX_WRITE_BYTES
    assert (harness.receiver.pool[: 8 * MIB] == harness.source).all()
    assert short_result.ok
    assert short_result.writes == 5000
    landed = harness.receiver.pool[16 * MIB : 16 * MIB + 5000 * 1024].reshape(5000, 1024)
    assert (landed[:, :512].reshape(-1) == harness.source[: 5000 * 512]).all()
    assert not landed[:, 512:].any()


def test_jobs_run_in_order_and_wait_for_ready_on_the_senders_thread(harness: Harness) -> None:
    gate = threading.Event()
    threads: list[threading.Thread] = []

    def ready() -> None:
        threads.append(threading.current_thread())
        assert gate.wait(5)

    harness.submit(key(1), copies([0], [0], [4096]), ready=ready)
    harness.submit(key(2), copies([0], [8192], [4096]))
    wait_until(lambda: harness.sender.stalled_s() > 0.03)
    assert harness.results.empty()
    assert not harness.receiver.pool[:16384].any()
    gate.set()
    assert [harness.result().job.key, harness.result().job.key] == [key(1), key(2)]
    assert threads[0] is not threading.current_thread()
    assert harness.sender.stalled_s() == 0.0


def test_failure_of_ready_fails_only_its_job(harness: Harness) -> None:
    def ready() -> None:
        raise RuntimeError("the forward pass failed")

    harness.submit(key(1), copies([0], [0], [4096]), ready=ready)
    harness.submit(key(2), copies([0], [4096], [4096]))
    failed, good = harness.result(), harness.result()
    assert (failed.ok, failed.late_writes, failed.writes) == (False, False, 0)
    assert "the forward pass failed" in failed.reason
    assert good.ok
    assert not harness.receiver.pool[:4096].any()


def test_an_empty_job_needs_no_peer(harness: Harness) -> None:
    harness.receiver.kill()
    harness.submit(key(1), copies([], [], []))
    assert harness.result().ok


def test_copies_outside_a_pool_are_refused_before_anything_is_written(harness: Harness) -> None:
    with pytest.raises(PlanError, match="exceeds the destination pool"):
        harness.submit(key(1), copies([0, 0], [0, POOL_BYTES - 10], [4096, 4096]))
    with pytest.raises(PlanError, match="exceeds the source pool"):
        harness.submit(key(1), copies([8 * MIB - 10], [0], [4096]))
    harness.submit(key(2), copies([0], [POOL_BYTES - 4096], [4096]))
    assert harness.result().job.key == key(2)
    assert not harness.receiver.pool[:-4096].any()


def test_peer_killed_in_the_middle_fails_running_and_queued_jobs(harness: Harness) -> None:
    pool = harness.receiver.pool
    harness.submit(key(1), fill(4 * MIB, POOL_BYTES))
    for number in range(2, 12):
        harness.submit(key(number), fill(4096, 8192))
    wait_until(lambda: pool[16 * MIB])
    harness.receiver.kill()
    killed_at = time.monotonic()
    assert not pool[-1], "the kill came too late to test anything"
    first = harness.result()
    assert (first.ok, first.cancelled, first.late_writes) == (False, False, True)
    assert harness.receiver.session in first.reason
    others = [harness.result() for _ in range(10)]
    assert [result.job.key for result in others] == [key(number) for number in range(2, 12)]
    assert not any(result.ok or result.late_writes for result in others)
    assert "refuses connections" in others[-1].reason
    assert time.monotonic() - killed_at < 10


def test_peer_stopped_before_the_connection_fails_jobs_fast_and_works_when_it_continues(receiver: Receiver) -> None:
    receiver.stop()
    started = time.monotonic()
    harness = Harness(receiver)
    for number in range(5):
        harness.submit(key(number), fill(4096, 8192))
    results = [harness.result() for _ in range(5)]
    assert time.monotonic() - started < 3.0  # a pre-flight of 1 s at start, and one for all five jobs
    assert not any(result.ok or result.late_writes or result.writes for result in results)
    assert all("does not answer" in result.reason for result in results)
    receiver.resume()
    harness.submit(key(9), fill(4096, 8192))
    assert harness.result().ok
    assert (receiver.pool[4096:8192] == harness.source[:4096]).all()
    harness.close()


def test_peer_stopped_in_the_middle_never_receives_reused_source_memory(harness: Harness) -> None:
    pool = harness.receiver.pool
    harness.submit(key(1), fill(4 * MIB, POOL_BYTES))
    wait_until(lambda: pool[16 * MIB])
    harness.receiver.stop()
    stopped_at = time.monotonic()
    assert not pool[-1], "the stop came too late to test anything"
    result = harness.result()
    assert time.monotonic() - stopped_at < 10
    assert (result.ok, result.cancelled, result.late_writes) == (False, False, True)
    assert "stopped receiving" in result.reason
    original = harness.source[: 4 * MIB].copy()
    harness.source[:] = 0  # reused by another request
    unlike, parts = 255 - original, pool.reshape(-1, 4 * MIB)
    parts[:] = unlike  # neither the old nor the new source bytes, so late writes are visible
    harness.receiver.resume()
    time.sleep(0.5)
    assert all(((part == unlike) | (part == original)).all() for part in parts)
    harness.source[: 4 * MIB] = original
    harness.submit(key(2), fill(4 * MIB, 32 * MIB))
    assert harness.result().ok
    assert (pool[: 32 * MIB] == np.resize(original, 32 * MIB)).all()


def test_stop_of_this_process_within_a_check_is_not_a_stall_of_the_peer(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivered_bytes = SendEngine.delivered_bytes
    stopped = threading.Event()

    def slow_delivered_bytes(engine: SendEngine) -> int | None:
        before = delivered_bytes(engine)
        if not stopped.is_set():
            stopped.set()
            time.sleep(sender_module.STALL_BASE_S + 0.5)
            harness.receiver.resume()
        return before

    harness.submit(key(1), fill(4096, 8192))
    assert harness.result().ok, "it has connected"
    harness.receiver.stop()
    monkeypatch.setattr(SendEngine, "delivered_bytes", slow_delivered_bytes)
    harness.submit(key(2), fill(4096, 8192))
    result = harness.result()
    assert stopped.is_set(), "no check was delayed"
    assert (result.ok, result.reason, result.late_writes) == (True, "", False)


def test_a_peer_restarted_elsewhere_works_with_a_new_sender(harness: Harness) -> None:
    harness.submit(key(1), fill(4096, 8192))
    assert harness.result().ok
    harness.receiver.kill()
    harness.submit(key(2), fill(4096, 8192))
    assert not harness.result().ok
    with Receiver(POOL_BYTES) as replacement:
        other = Harness(replacement)
        other.submit(key(3), fill(4 * MIB, 8 * MIB))
        assert other.result().ok
        assert (replacement.pool[4 * MIB : 8 * MIB] == other.source[: 4 * MIB]).all()
        other.close()


def test_cancelling_stops_a_transfer_and_lets_the_next_one_through(harness: Harness) -> None:
    pool = harness.receiver.pool
    harness.submit(key(1), fill(256 << 10, POOL_BYTES))
    harness.submit(key(1), fill(4096, 8192))
    harness.submit(key(2), copies([0], [0], [4096]))
    wait_until(lambda: pool[8 * MIB])
    harness.sender.cancel(key(1))
    first, second, third = harness.result(), harness.result(), harness.result()
    assert (first.job.key, first.ok, first.cancelled, first.late_writes) == (key(1), False, True, False)
    assert 0 < first.bytes_written < POOL_BYTES
    assert (second.job.key, second.ok, second.cancelled, second.writes) == (key(1), False, True, 0)
    assert (third.job.key, third.ok) == (key(2), True)
    landed = np.count_nonzero(pool[4096:])
    assert landed == first.bytes_written - 4096, "a cancelled job reports exactly what it wrote"
    settled = pool.copy()
    harness.source[:] = 0
    time.sleep(0.2)
    assert (pool == settled).all(), "nothing is read from the source after the result"


def test_closing_while_busy_reports_every_job_once(receiver: Receiver) -> None:
    harness = Harness(receiver)
    for number in range(6):
        harness.submit(key(number), fill(256 << 10, POOL_BYTES))
    wait_until(lambda: receiver.pool[8 * MIB])
    started = time.monotonic()
    harness.sender.close()
    assert time.monotonic() - started < 1
    results = [harness.results.get_nowait() for _ in range(6)]
    assert sorted(result.job.key.transfer_id for result in results) == list(range(6))
    assert not any(result.ok for result in results)
    assert all(result.cancelled and not result.late_writes for result in results)
    with pytest.raises(RuntimeError, match="closed"):
        harness.submit(key(7), fill(4096, 8192))
    harness.close()


def test_closing_with_a_hung_peer_is_bounded(receiver: Receiver) -> None:
    harness = Harness(receiver)
    harness.submit(key(1), fill(4 * MIB, POOL_BYTES))
    wait_until(lambda: receiver.pool[8 * MIB])
    receiver.stop()
    started = time.monotonic()
    harness.sender.close()
    assert time.monotonic() - started < 10
    result = harness.result(0.1)
    assert (result.ok, result.cancelled, result.late_writes) == (False, True, True)
    harness.close()


def test_an_exception_in_the_callback_does_not_end_the_thread(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(receiver)
    seen: list[SendResult] = []

    def fail_once(result: SendResult) -> None:
        seen.append(result)
        if len(seen) == 1:
            raise RuntimeError("boom")

    for number in (1, 2):
        harness.sender.submit(SendJob(key(number), fill(4096, 8192), harness.pools, fail_once))
    wait_until(lambda: len(seen) == 2)
    assert [result.ok for result in seen] == [True, True]
    assert "boom" in caplog.text
    harness.close()


@pytest.mark.parametrize("window", [0, 513])
def test_window_beyond_the_queue_limit_is_refused(window: int) -> None:
    row = KvLayout((Plane("k", 1),), 0, 1, 0, 1, 1, 1, "uint8")
    with pytest.raises(ValueError, match=f"window must be 1 to 512, got {window}"):
        PeerSender(
            [KvRoute("tcp", "127.0.0.1:1")],
            [PoolPair(Region(0, 1), Pool(row, 0, 1))],
            window=window,
        )


SLOW_BYTES_PER_S = 30e6 / 8


SLOW_STALL_S = 3.0
"""Shorter than a write, and longer than a busy machine delays the proxy."""


@pytest.fixture
def slow(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Harness, MooncakeProxy]]:
    """A sender to a receiver behind a network of 30 Mbit/s: writes of 4 MiB on each of four lanes take 4.5 s."""
    monkeypatch.setattr(sender_module, "STALL_BASE_S", SLOW_STALL_S)
    with MooncakeProxy(receiver.session, SLOW_BYTES_PER_S) as proxy:
        receiver.session = proxy.session
        made = Harness(receiver, window=16)
        yield made, proxy
        made.close()


def test_slow_network_does_not_fail_the_job(slow: tuple[Harness, MooncakeProxy]) -> None:
    harness, _ = slow
    before = time.monotonic()
    harness.submit(key(1), copies([0, 0], [0, 8 * MIB], [8 * MIB, 8 * MIB]))
    wait_until(lambda: harness.receiver.pool[: 16 * MIB].any())
    worst_s = 0.0
    while harness.results.empty():
        worst_s = max(worst_s, harness.sender.stalled_s())
        time.sleep(0.01)
    result = harness.result()
    assert (result.ok, result.reason) == (True, "")
    assert time.monotonic() - before > 0.9 * 16 * MIB / SLOW_BYTES_PER_S
    assert worst_s < SLOW_STALL_S, "a slow network was taken for a stalled one"
    assert (harness.receiver.pool[: 8 * MIB] == harness.source).all()
    assert (harness.receiver.pool[8 * MIB : 16 * MIB] == harness.source).all()


def test_stalled_network_is_detected_after_slow_progress(slow: tuple[Harness, MooncakeProxy]) -> None:
    harness, proxy = slow
    harness.submit(key(1), copies([0], [0], [8 * MIB]))
    wait_until(lambda: harness.receiver.pool[: 8 * MIB].any())
    time.sleep(1.5)
    assert harness.results.empty()
    proxy.flows.clear()
    before = time.monotonic()
    result = harness.result()
    assert (result.ok, result.late_writes) == (False, True)
    assert "stopped receiving" in result.reason
    assert time.monotonic() - before < 10


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_cancelled_job_on_a_slow_network_ends_in_bounded_time(slow: tuple[Harness, MooncakeProxy], how: str) -> None:
    harness, _ = slow
    harness.submit(key(1), fill(8 * MIB, 64 * MIB))
    wait_until(lambda: harness.receiver.pool[: 8 * MIB].any())
    before = time.monotonic()
    if how == "cancel":
        harness.sender.cancel(key(1))
    else:
        harness.sender.close()
    result = harness.result()
    assert time.monotonic() - before < 10
    assert (result.ok, result.cancelled, result.late_writes) == (False, True, True)
