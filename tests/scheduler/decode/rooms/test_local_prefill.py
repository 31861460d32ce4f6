"""Prompts that a decode server computes: the size of its steps."""

import collections

import pytest

from pdserve.scheduler.decode.rooms.computing import Computing, whole_tiles
from pdserve.scheduler.rates import Rates
from tests.scheduler.simulation.timed_simulator import decode_limits


@pytest.mark.parametrize(("batch", "tokens"), [(0, 2048), (64, 1984), (2040, 16), (4096, 16)])
def test_a_step_has_room_for_running_requests_and_at_least_a_page(batch: int, tokens: int) -> None:
    assert whole_tiles(2048, batch, most=2048, page_size=16) == tokens


@pytest.mark.parametrize(("batch", "most", "rows"), [(1, 500, 500), (60, 525, 512), (120, 612, 612), (3, 100, 100)])
def test_a_step_does_not_begin_a_tile_for_a_few_tokens(batch: int, most: int, rows: int) -> None:
    """The GPU computes tiles of 128 tokens."""
    assert whole_tiles(most, batch, most=most, page_size=1) + batch == rows


@pytest.mark.parametrize(
    ("stages", "in_flight", "wait_s"), [(1, 1, 0.01), (1, 2, 0.01), (2, 1, 0.01), (2, 2, 0.03), (4, 4, 0.07)]
)
def test_prompt_passes_all_stages_behind_the_steps_in_flight(stages: int, in_flight: int, wait_s: float) -> None:
    """A decode step takes 10 ms in a stage, with prompt tokens 20 ms."""
    limits = decode_limits(page_size=16, max_step_tokens=512, slo_itl_s=stages * 0.02, stages=stages)
    local = Computing(limits, Rates(), collections.Counter())
    local.times.started(4, 0, 0.0)
    local.times.ended(0.01)
    local.times.running = 4
    for _ in range(in_flight):
        local.times.started(4, 0, 0.01)
    assert local.expected_s(100, 1000.0) == pytest.approx(wait_s + 2 * 0.1), "half of the time is for decode steps"


@pytest.mark.parametrize(("running", "seconds"), [(4, 0.2 * 0.01), (0, 1.2 * 0.01)])
def test_step_with_a_short_prompt_is_at_most_a_fifth_longer_than_a_decode_step(running: int, seconds: float) -> None:
    """A decode step takes 10 ms."""
    local = Computing(decode_limits(max_step_tokens=512), Rates(), collections.Counter())
    local.times.started(4, 0, 0.0)
    local.times.ended(0.01)
    local.times.running = running
    assert local.short_tokens(10_000) == pytest.approx(seconds * 10_000, abs=1)
    assert local.short_tokens(1e9) == 512, "at most a step"
