"""Measured steps of a decode server that computes prompts."""

import pytest

from pdserve.scheduler.decode.rooms.computing import REMEASURE_STEPS, StepTimes
from pdserve.scheduler.rates import Rate


def test_rate_of_prompt_tokens_excludes_the_decode_step() -> None:
    rate = Rate()
    times = StepTimes(rate)
    for at, (running, tokens, seconds) in enumerate([(4, 0, 0.25), (4, 100, 0.75), (0, 100, 0.5)]):
        times.started(running, tokens, 10.0 * at)
        assert times.ended(10.0 * at + seconds) == seconds
    assert times.idle_step_s(4) == times.idle_step_s(1) == times.idle_step_s(100) == 0.25
    assert [sample for sample, _ in rate._samples] == [200, 200]


def test_prompt_rate_of_mixed_steps_is_at_most_that_of_steps_without_requests() -> None:
    times = StepTimes(Rate())

    def step(running: int, tokens: int, seconds: float) -> None:
        times.started(running, tokens, 0.0)
        times.ended_at = -1.0
        times.ended(seconds)

    assert times.tokens_per_s(2048) is None
    step(0, 1, 0.010)
    assert times.tokens_per_s(2048) is None, "one token shows the fixed cost of a step"
    step(0, 1024, 0.025)
    step(32, 0, 0.005)
    step(32, 512, 0.005)
    assert times.tokens_per_s(2048) == pytest.approx(1024 / 0.025), "in the mixed step, tokens seemed to take no time"
    for _ in range(2):
        step(32, 240, 0.015)
    assert times.tokens_per_s(2048) == pytest.approx(240 / 0.010)


def test_overlapping_steps_count_from_the_end_of_the_previous_one() -> None:
    times = StepTimes(Rate())
    times.started(1, 0, 0.0)
    times.started(1, 0, 0.1)
    assert [times.ended(1.0), times.ended(1.5)] == [1.0, 0.5]


def test_idle_step_is_measured_again_after_many_mixed_steps() -> None:
    times = StepTimes(Rate())
    assert times.remeasure(1), "it was never measured"
    times.started(1, 0, 0.0)
    assert not times.remeasure(1), "a step that measures it is in flight"
    times.ended(1.0)
    for _ in range(REMEASURE_STEPS):
        assert not times.remeasure(1)
        times.started(1, 5, 0.0)
        times.started(0, 5, 0.0)  # without running requests, it shows nothing
    assert times.remeasure(1)
    times.started(1, 0, 0.0)
    assert not times.remeasure(1)


def test_idle_step_of_a_larger_batch_is_measured() -> None:
    times = StepTimes(Rate())
    for running, seconds in ((1, 0.004), (60, 0.008)):
        assert times.remeasure(running)
        times.started(running, 0, 10.0 * running)
        times.ended(10.0 * running + seconds)
    assert times.idle_step_s(63) == pytest.approx(0.008)
    assert times.idle_step_s(5) == pytest.approx(0.004), "the nearest smaller batch"
    assert not times.remeasure(40)
