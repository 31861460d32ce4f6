"""The watchdog names what has stopped: the engine loop, a step, the control thread."""

import collections
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from pdserve.scheduler.engine.prefill_engine import PrefillEngine
from pdserve.scheduler.engine.watchdog import Watchdog
from pdserve.scheduler.messages.ranks import RunStep, StepDone
from pdserve.scheduler.messages.step import StepRow


class Server:
    """The attributes of a loop, its engine and its control thread that the watchdog reads, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.control_turned_at: float | None = None
        self.engine = SimpleNamespace(steps_in_flight=collections.deque(), last_step=None)
        self.loop = SimpleNamespace(turned_at=self.now, engines=[self.engine])
        loop: Any = self.loop
        control: Any = SimpleNamespace(progress_age_s=lambda: self.now - (self.control_turned_at or self.now))
        self.watchdog = Watchdog(loop, [control], clock=lambda: self.now)

    def run_for(self, seconds: float, *, loop_turns: bool = True) -> list[str]:
        """The problems at the end."""
        found: list[str] = []
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            if loop_turns:
                self.loop.turned_at = self.now
            found = self.watchdog.problems()
        return found


def step(tokens: int) -> RunStep:
    return RunStep(7, (StepRow((0,) * tokens, 0, (0,)),))


def test_stuck_engine_loop_is_named_within_five_seconds_until_it_turns_again() -> None:
    server = Server()
    assert server.run_for(10.0) == []
    assert server.run_for(4.0, loop_turns=False) == []
    assert server.run_for(0.5, loop_turns=False) == ["the engine loop has made no progress for 4 s"]
    assert server.run_for(0.25) == []


def test_stuck_control_thread_is_named() -> None:
    server = Server()
    server.run_for(10.0)
    server.control_turned_at = server.now
    assert server.run_for(4.5) == ["the control thread has made no progress for 4 s"]


def test_step_is_stuck_if_it_takes_far_longer_than_earlier_steps() -> None:
    server = Server()
    server.run_for(10.0)
    server.engine.last_step = step(1), 0.01
    server.engine.steps_in_flight.append((server.now, step(8)))
    assert server.run_for(4.0) == []
    assert server.run_for(0.5) == ["step 7 has been on the ranks for 4 s"]


def test_long_step_of_a_slow_machine_is_not_stuck() -> None:
    """A step of one token took 10 ms, so one of 2,048 tokens may take 20 s, and is stuck only after ten times that."""
    server = Server()
    server.run_for(10.0)
    server.engine.last_step = step(1), 0.01
    server.engine.steps_in_flight.append((server.now, step(2048)))
    assert server.run_for(60.0) == []


def test_step_during_which_the_process_was_stopped_does_not_set_the_limit() -> None:
    """The server is idle afterwards, so this step stays its last one."""
    server = Server()
    server.run_for(10.0)
    server.engine.last_step = step(1), 0.01
    assert server.run_for(1.0) == []
    server.now += 60.0
    server.engine.last_step = step(1), 60.0
    assert server.run_for(10.0) == []
    server.engine.steps_in_flight.append((server.now, step(8)))
    assert server.run_for(4.5) == ["step 7 has been on the ranks for 4 s"]


def test_step_begins_when_the_one_before_it_is_done() -> None:
    """The second step is sent ahead; it is not stuck while it waits for a long one."""
    server = Server()
    engine = server.loop.engines[0] = PrefillEngine(Mock(), Mock(), control=Mock(), welcome=Mock())
    server.run_for(10.0)
    engine.last_step = step(1), 0.01
    engine.start(step(2048), server.now)
    engine.start(step(1), server.now)
    assert server.run_for(20.0) == []
    assert engine.take_step(StepDone(0, 7, ()), server.now) == 20.0
    assert server.run_for(4.0) == []
    assert server.run_for(0.5) == ["step 7 has been on the ranks for 4 s"]


def test_first_step_of_a_server_has_no_limit() -> None:
    server = Server()
    server.engine.steps_in_flight.append((server.now, step(8)))
    assert server.run_for(60.0) == []


def test_stuck_step_of_a_data_parallel_rank_is_named_with_its_rank() -> None:
    server = Server()
    other = SimpleNamespace(steps_in_flight=collections.deque(), last_step=(step(1), 0.01))
    server.loop.engines.append(other)
    server.run_for(10.0)
    other.steps_in_flight.append((server.now, step(8)))
    assert server.run_for(4.5) == ["data-parallel rank 1: step 7 has been on the ranks for 4 s"]
