"""The clock of simulations, and work that shares cores."""

import pytest

from pdserve.scheduler.simulation.clock import Clock, Cores


def run(cores: int | None, work: list[tuple[float, float, int]]) -> list[tuple[float, int]]:
    """(end, number) of each (start, seconds, cores), in the order of their ends."""
    clock, ended = Clock(), []
    machine = Cores(clock, cores)
    for number, (start, seconds, needed) in enumerate(work):
        clock.at(
            start,
            lambda number=number, seconds=seconds, needed=needed: machine.run(  # type: ignore[misc]  # bound defaults
                seconds, needed, lambda: ended.append((clock.now, number))
            ),
        )
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


def test_work_beside_other_work_takes_longer_by_its_slowdown() -> None:
    clock, ended = Clock(), []
    machine = Cores(clock, 2)
    machine.run(1.0, 1, lambda: ended.append(("short", clock.now)), slowdown=1.5)
    machine.run(2.0, 1, lambda: ended.append(("long", clock.now)), slowdown=1.25)
    while clock.run_next():
        pass
    # until 1.5 both are slower; the long one has done 1.2 of its 2 s then, and runs alone
    assert [name for name, _ in ended] == ["short", "long"]
    assert [at for _, at in ended] == pytest.approx([1.5, 2.3])
