"""The short form of `make overload`, without the figures that depend on how busy the test machine is."""

from pathlib import Path

from tests.cluster.servers import cluster
from tests.faults.overload import FACTOR, QUEUE, SLOTS, Overload, Tally

SECONDS = (1.5, 6.0, 24.0)
"""Durations of a phase. The next one is tried if no request is complete by then, because the test machine is busy."""


def test_accepted_requests_are_served_and_others_get_429(tmp_path: Path) -> None:
    with cluster(tmp_path) as servers:
        overload = Overload(servers, tmp_path)
        for seconds in SECONDS:
            figures = overload.run(FACTOR * SLOTS, seconds, bursts=True)
            if figures.goodput > 0:
                break
        assert figures.wrong == ()
        assert figures.goodput > 0
        assert figures.refused > 0, "the queue was never full"
        overload.abandon()
        overload.check_clean()


def test_retry_after_is_compared_with_the_time_that_the_queue_takes() -> None:
    tally = Tally(served_at=[0.5 * number for number in range(1, 2 * QUEUE)])
    tally.refused = [(0.0, QUEUE // 2), (1.0, QUEUE), (float(QUEUE), 1)]
    assert tally.errors_of_retry_after() == [1.0, 2.0], "only the last refusal is too late to be compared"
