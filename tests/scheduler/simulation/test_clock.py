"""The clock of simulations, and work that shares cores."""

import functools

import msgspec
import pytest

from pdserve.scheduler.simulation.clock import Clock, Cores
from pdserve.scheduler.simulation.step_times import Interference, Role, StepTimes

ALONE = StepTimes(prefill_token_s=0.001, decode_steps=((1, 0.01),))
MEASURED = msgspec.structs.replace(
    ALONE, interference=(Interference(1, 1, 1.5, 1.25), Interference(2, 0, 1.1), Interference(2, 1, 1.2, 0.9))
)


def run(
    cores: int | None, work: list[tuple[float, float, int]], times: StepTimes = ALONE, roles: str = "ppp"
) -> list[tuple[float, int]]:
    """(end, number) of each (start, seconds, cores), in the order of their ends. `roles` are p (prefill) or d."""
    clock, ended = Clock(), []
    machine = Cores(clock, cores, times)

    def step(number: int, seconds: float, needed: int) -> None:
        role: Role = "prefill" if roles[number] == "p" else "decode"
        machine.run(role, seconds, needed, lambda: ended.append((clock.now, number)))

    for number, (start, seconds, needed) in enumerate(work):
        clock.at(start, functools.partial(step, number, seconds, needed))
    while clock.run_next():
        pass
    return ended


def test_events_of_one_time_run_in_the_order_of_their_calls() -> None:
    clock, seen = Clock(), []
    for number in (2, 0, 1):
        clock.at(1.0, lambda number=number: seen.append(number))  # type: ignore[misc]  # a bound default
    clock.at(0.5, lambda: seen.append(9))
    while clock.run_next():
        pass
    assert (seen, clock.now) == ([9, 2, 0, 1], 1.0)


def test_work_on_devices_of_its_own_runs_at_full_speed() -> None:
    assert run(None, [(0, 2, 1), (0, 3, 1), (1, 1, 1)]) == [(2.0, 0), (2.0, 2), (3.0, 1)]


def test_work_that_fits_the_cores_runs_at_full_speed() -> None:
    assert run(2, [(0, 2, 1), (0, 3, 1)]) == [(2.0, 0), (3.0, 1)]


def test_work_shares_cores_evenly_and_speeds_up_when_some_ends() -> None:
    # three pieces on two cores run at 2/3 until the first ends at 1.5, then at full speed
    ended = run(2, [(0, 1, 1), (0, 2, 1), (0, 2, 1)])
    assert [number for _, number in ended] == [0, 1, 2]
    assert [at for at, _ in ended] == pytest.approx([1.5, 2.5, 2.5])


def test_work_that_starts_later_slows_down_what_runs() -> None:
    # 1 of 2 s is done when the other starts; both run at half speed until 3, when the first ends
    assert [at for at, _ in run(1, [(0, 2, 1), (1, 2, 1)])] == pytest.approx([3.0, 4.0])


def test_steps_beside_each_other_take_longer_by_their_interference() -> None:
    # until 1.5 both are slower; the decode step has done 1.2 of its 2 s then, and runs alone
    ended = run(2, [(0, 1, 1), (0, 2, 1)], MEASURED, "pd")
    assert [number for _, number in ended] == [0, 1]
    assert [at for at, _ in ended] == pytest.approx([1.5, 2.3])


def test_three_steps_on_two_cores_share_them_and_interfere() -> None:
    # prefill runs at 2/3 / 1.2 = 5/9, decode at 2/3 / 0.9 = 20/27. The decode step ends at 1.35, with 0.75 of each
    # prompt done; then both run at 1 / 1.1, and the first, with 0.25 left, ends at 1.625; the last has 0.25 left then.
    ended = run(2, [(0, 1, 1), (0, 1.25, 1), (0, 1, 1)], MEASURED, "ppd")
    assert [number for _, number in ended] == [2, 0, 1]
    assert [at for at, _ in ended] == pytest.approx([1.35, 1.625, 1.875])


def test_servers_on_devices_of_their_own_do_not_interfere() -> None:
    assert run(None, [(0, 1, 1), (0, 2, 1)], MEASURED, "pd") == [(1.0, 0), (2.0, 1)]


@pytest.mark.parametrize(
    ("role", "prefills", "decodes", "factor"),
    [
        ("prefill", 1, 0, 1.0),
        ("prefill", 1, 1, 1.5),
        ("prefill", 2, 2, 1.5),
        ("prefill", 3, 0, 1.1),
        ("prefill", 4, 2, 1.2),
        ("prefill", 3, 1, 1.2),
        ("decode", 1, 3, 1.25),
        ("decode", 0, 2, 1.25),
        ("decode", 5, 2, 0.9),
    ],
)
def test_interference_is_that_of_the_nearest_measured_numbers_of_servers(
    role: Role, prefills: int, decodes: int, factor: float
) -> None:
    assert MEASURED.interference_factor(role, prefills, decodes) == factor
    assert ALONE.interference_factor(role, prefills, decodes) == 1.0
