"""The rule for steps with prompts: deadlines of first tokens, limits on gaps, and what happens if both cannot hold."""

import math

import pytest

from pdserve.scheduler.chunking.step_rule import LATE_GAPS, Waiting, due_at, gap_limit_s, prompt_time


@pytest.mark.parametrize(
    ("idle_step_s", "slo_itl_s", "limit"),
    [
        (0.004, None, 0.045),
        (0.030, None, 0.075),
        (0.004, 0.020, 0.020),
        (0.030, 0.020, 0.020),
        (0.030, 0.0, math.inf),
    ],
)
def test_limit_on_gaps(idle_step_s: float, slo_itl_s: float | None, limit: float) -> None:
    assert gap_limit_s(idle_step_s, slo_itl_s, auto_s=0.045) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("idle_step_s", "limit", "part"),
    [(0.004, 0.045, 0.041), (0.030, 0.075, 0.045), (0.060, 0.045, 0.060 * 3 / 7), (0.004, math.inf, math.inf)],
)
def test_prompts_get_the_rest_of_the_limit_and_three_tenths_of_the_time_at_least(
    idle_step_s: float, limit: float, part: float
) -> None:
    assert prompt_time(idle_step_s, limit, ()).seconds == pytest.approx(part)


@pytest.mark.parametrize(
    ("waiting", "late"),
    [
        ([Waiting(0.100, 0.070)], False),
        ([Waiting(0.100, 0.090)], True),
        ([Waiting(0.100, 0.050), Waiting(0.150, 0.060)], False),
        ([Waiting(0.100, 0.050), Waiting(0.150, 0.080)], True),
    ],
)
def test_gaps_are_longer_while_first_tokens_would_be_late(waiting: list[Waiting], late: bool) -> None:
    """Decode steps of 10 ms and a limit of 50 ms: prompts get four fifths of the time."""
    limit = LATE_GAPS * 0.05 if late else 0.05
    found = prompt_time(0.010, 0.050, waiting)
    assert found.seconds == pytest.approx(limit - 0.010)
    assert found.late == late


@pytest.mark.parametrize(
    ("compute_s", "due"), [(0.010, 0.075), (0.100, 0.300), (0.300, 0.500)], ids=["short", "longer", "its limit"]
)
def test_first_deadline(compute_s: float, due: float) -> None:
    found = due_at(10.0, 10.0, compute_s, compute_s, 0.5)
    assert found == pytest.approx(10 + due)


@pytest.mark.parametrize("own_s", [0.02, 30.0])
def test_own_limit_of_a_request_replaces_the_deadline(own_s: float) -> None:
    assert due_at(10.0, 10.0, 0.01, 0.01, 0.5, own_s=own_s) == pytest.approx(10 + own_s)


def test_prompt_that_cannot_be_on_time_does_not_come_before_one_that_can() -> None:
    missed = due_at(10.0, 10.5, compute_s=1.0, left_s=0.6, slo_ttft_s=0.5)
    fresh = due_at(10.45, 10.5, compute_s=0.05, left_s=0.05, slo_ttft_s=0.5)
    assert fresh < missed


def test_late_prompt_comes_before_a_new_one_before_long() -> None:
    late = due_at(10.0, 20.0, compute_s=2.0, left_s=2.0, slo_ttft_s=0.5)
    assert late < due_at(20.0, 20.0, compute_s=0.01, left_s=0.01, slo_ttft_s=0.5)


def test_equal_prompts_that_are_late_are_in_order_of_arrival() -> None:
    found = [due_at(arrived, 20.0, 0.4, 0.4, 0.5) for arrived in (10.0, 15.0, 18.0, 19.0, 19.45)]
    assert found == sorted(found)
