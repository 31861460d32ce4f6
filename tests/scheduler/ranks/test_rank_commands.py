"""The next command of a rank: it does not wait for the device while another step may be started."""

import collections
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.configs.schema import PrefillConfig
from pdserve.models.loading.catalog import locate_model
from pdserve.scheduler.messages.ranks import (
    CheckCache,
    ComputeCommand,
    RankFailed,
    RankReport,
    RunStep,
    StepDone,
    StopRank,
)
from pdserve.scheduler.messages.step import StepResult, StepRow
from pdserve.scheduler.ranks.executor import PendingStep
from pdserve.scheduler.ranks.rank import PendingCommand, RankEngine, next_command
from pdserve.transfer.data.chunks import PartScatter
from pdserve.transfer.protocol.messages import HeadSlice, StagePart, TransferKey
from tests.checkpoints import make_checkpoint


class Step(PendingStep):
    """A step whose duration the test controls."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.over = threading.Event()

    @property
    def done(self) -> bool:
        return self.over.is_set()


def steps(*running: Step) -> "collections.deque[PendingCommand]":
    return collections.deque(PendingCommand(command_id, step) for command_id, step in enumerate(running))


def later(action: "threading.Timer") -> None:
    action.daemon = True
    action.start()


def test_command_that_arrives_during_a_step_is_taken_before_the_step_ends() -> None:
    commands: queue.SimpleQueue[ComputeCommand] = queue.SimpleQueue()
    running, command = Step(), CheckCache()
    later(threading.Timer(0.02, commands.put, [command]))
    later(threading.Timer(5.0, running.over.set))
    assert next_command(commands, steps(running), 2) is command
    assert not running.done


def test_step_that_is_done_is_finished_soon_when_no_command_waits() -> None:
    commands: queue.SimpleQueue[ComputeCommand] = queue.SimpleQueue()
    running = Step()
    later(threading.Timer(0.02, running.over.set))
    began = time.monotonic()
    assert next_command(commands, steps(running), 2) is None
    assert running.done
    assert time.monotonic() - began < 2.0


def test_waiting_command_comes_before_a_step_that_is_done() -> None:
    commands: queue.SimpleQueue[ComputeCommand] = queue.SimpleQueue()
    command, running = CheckCache(), Step()
    running.over.set()
    commands.put(command)
    assert next_command(commands, steps(running), 2) is command


def test_oldest_step_is_finished_first_when_no_further_step_may_start() -> None:
    commands: queue.SimpleQueue[ComputeCommand] = queue.SimpleQueue()
    commands.put(CheckCache())
    assert next_command(commands, steps(Step(), Step()), 2) is None
    assert next_command(commands, steps(Step()), 1) is None


def test_rank_waits_for_a_command_when_nothing_is_in_flight() -> None:
    commands: queue.SimpleQueue[ComputeCommand] = queue.SimpleQueue()
    command = CheckCache()
    later(threading.Timer(0.02, commands.put, [command]))
    assert next_command(commands, steps(), 2) is command


def make_rank(directory: Path, reports: list[RankReport]) -> RankEngine:
    source = locate_model(str(make_checkpoint(directory, "llama")), "auto")
    config = PrefillConfig(model=str(directory), device="cpu", kv_tokens=64)
    return RankEngine(config, source, 0, meet_at=None, report=reports.append)


def test_failed_step_is_reported_before_the_next_one_and_a_failed_copy_ends_the_rank(tmp_path: Path) -> None:
    """The leader takes reports in the order of its commands. A copy without a report would keep its pages for ever."""
    reports: list[RankReport] = []
    rank = make_rank(tmp_path, reports)

    def fail() -> list[StepResult]:
        raise RuntimeError("the device is lost")

    def pending(command_id: int, collect: Callable[[], list[StepResult]], *, is_step: bool = True) -> PendingCommand:
        return PendingCommand(command_id, PendingStep(torch.device("cpu"), collect), is_step)

    commands: queue.SimpleQueue[ComputeCommand] = queue.SimpleQueue()
    commands.put(StopRank())
    rank._pending += [pending(1, fail), pending(2, list), pending(3, fail)]
    rank.serve(commands)
    error = "RuntimeError: the device is lost"
    assert reports == [StepDone(0, 1, (), error), StepDone(0, 2, ()), StepDone(0, 3, (), error)]
    rank._pending.append(pending(4, fail, is_step=False))
    with pytest.raises(RuntimeError, match="the device is lost"):
        rank.serve(commands)
    rank.close()
    assert len(reports) == 3


def test_step_that_cannot_start_is_reported_after_the_step_in_flight(tmp_path: Path) -> None:
    reports: list[RankReport] = []
    rank = make_rank(tmp_path, reports)
    rank._steps_ahead = 2  # as on a GPU
    rank._pending.append(PendingCommand(1, PendingStep(torch.device("cpu"), list)))
    commands: queue.SimpleQueue[ComputeCommand] = queue.SimpleQueue()
    commands.put(RunStep(2, (StepRow((), 3, [0], follows=0),)))  # no token was sampled that it could follow
    commands.put(StopRank())
    rank.serve(commands)
    rank.close()
    error = "RuntimeError: the step that this one follows has failed"
    assert reports == [StepDone(0, 1, ()), StepDone(0, 2, (), error)]


def test_step_whose_writes_cannot_be_started_ends_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step itself is in flight. If it were reported as failed and later as done, the second report would count for
    the next step.
    """
    reports: list[RankReport] = []
    rank = make_rank(tmp_path, reports)
    assert rank._writes is not None

    def fail(_command_id: int, _wait: Callable[[], None]) -> None:
        raise RuntimeError("no such sender")

    monkeypatch.setattr(rank._writes.early_writes, "step_started", fail)
    commands: queue.SimpleQueue[ComputeCommand] = queue.SimpleQueue()
    commands.put(RunStep(1, (StepRow((1, 2, 3), 0, [0]),)))
    commands.put(StopRank())
    with pytest.raises(RuntimeError, match="no such sender"):
        rank.serve(commands)
    rank.close()
    assert not reports


def test_failed_transfer_command_is_reported_with_its_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It runs on another thread than the steps, where an exception would be lost."""
    reports: list[RankReport] = []
    rank = make_rank(tmp_path, reports)
    part = StagePart(1, TransferKey(1, 1), 0, 0, HeadSlice(0, 1, 0, 1), 0, 1)
    rank.transfer(PartScatter(part, 0, 8, [0], 0))  # a command for decode ranks
    rank.close()
    assert reports == [
        RankFailed(
            0,
            "PartScatter failed: AssertionError: PartScatter for a rank without a staging ring",
        )
    ]
    assert "Traceback" in caplog.text
