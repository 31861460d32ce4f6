"""Chunk writes start with their step, and every one of them ends exactly once."""

from collections.abc import Callable

from pdserve.scheduler.ranks.transfers.early_writes import EarlyWrites
from pdserve.transfer.data.chunks import ChunkWrite, ChunkWritten
from pdserve.transfer.protocol.messages import InstanceId, TransferKey

DECODE, OTHER = InstanceId("decode"), InstanceId("other")


def step_is_done() -> None:
    """Stands for the wait for a step."""


class Recorder:
    def __init__(self) -> None:
        self.started: list[ChunkWrite] = []
        self.ended: list[ChunkWritten] = []
        self.early = EarlyWrites(self._write, self.ended.append)

    def _write(self, chunk: ChunkWrite, ready: Callable[[], None]) -> None:
        assert ready is step_is_done
        self.started.append(chunk)


def write(after: int, number: int = 1, instance: InstanceId = DECODE, start: int = 0) -> ChunkWrite:
    return ChunkWrite(instance, TransferKey(number, 1), start, start + 16, [1], [2], after=after)


def test_write_starts_with_its_step() -> None:
    recorder = Recorder()
    chunks = [write(1), write(1, number=2), write(2, start=16)]
    for chunk in chunks:
        recorder.early.add(chunk)
    assert not recorder.started
    recorder.early.step_started(1, step_is_done)
    assert recorder.started == chunks[:2]
    recorder.early.step_started(2, step_is_done)
    assert recorder.started == chunks
    recorder.early.step_started(3, step_is_done)
    recorder.early.cancel(DECODE, TransferKey(1, 1))
    assert (recorder.started, recorder.ended) == (chunks, [])


def test_cancelled_write_ends_and_does_not_start() -> None:
    recorder = Recorder()
    mine = [write(1), write(2, start=16)]
    others = [write(1, number=2), write(2, instance=OTHER)]
    for chunk in mine + others:
        recorder.early.add(chunk)
    recorder.early.cancel(DECODE, TransferKey(1, 1))
    assert [(end.instance, end.key, end.token_start, end.ok, end.reason) for end in recorder.ended] == [
        (DECODE, TransferKey(1, 1), start, False, "cancelled") for start in (0, 16)
    ]
    recorder.early.step_started(1, step_is_done)
    recorder.early.step_started(2, step_is_done)
    assert recorder.started == others


def test_write_of_a_failed_step_ends() -> None:
    recorder = Recorder()
    recorder.early.add(write(1))
    recorder.early.add(write(2))
    recorder.early.step_failed(1)
    assert [(end.ok, end.reason) for end in recorder.ended] == [(False, "the step failed")]
    recorder.early.step_started(1, step_is_done)
    assert not recorder.started
