"""A thread counts as stuck only if the process that checks it was running all the time."""

from pdserve.common.stuck import STUCK_S, Watch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run_for(clock: Clock, watch: Watch, seconds: float) -> None:
    for _ in range(round(seconds / 0.25)):
        clock.now += 0.25
        watch.check()


def test_thread_without_progress_is_stuck_after_the_limit() -> None:
    clock = Clock()
    watch = Watch(clock)
    run_for(clock, watch, 10.0)
    assert not watch.is_stuck(STUCK_S)
    assert watch.is_stuck(STUCK_S + 0.1)
    assert not watch.is_stuck(STUCK_S + 0.1, limit_s=60.0)


def test_nothing_is_stuck_after_the_process_itself_was_stopped() -> None:
    clock = Clock()
    watch = Watch(clock)
    run_for(clock, watch, 10.0)
    clock.now += 30.0  # SIGSTOP
    assert not watch.is_stuck(30.0), "before the first check after the stop"
    watch.check()
    assert not watch.is_stuck(30.0), "the thread was stopped too, and has not run since"
    run_for(clock, watch, STUCK_S)
    assert not watch.is_stuck(30.0 + STUCK_S)
    run_for(clock, watch, 0.25)
    assert watch.is_stuck(30.25 + STUCK_S)
