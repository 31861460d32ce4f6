"""Progress of long jobs in the log."""

import logging

import pytest

from pdserve.common.progress import ProgressLog

log = logging.getLogger("pdserve.common.progress")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list whose only element is the current time."""
    now = [100.0]
    monkeypatch.setattr("pdserve.common.progress.time.monotonic", lambda: now[0])
    return now


def test_long_job_logs_progress_every_few_seconds(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    job = ProgressLog(log, "weights: %.1f of %.1f GiB", 12)
    for _ in range(12):
        clock[0] += 2
        job.add(1)
    assert [record.getMessage() for record in caplog.records] == [
        "weights: 3.0 of 12.0 GiB",
        "weights: 6.0 of 12.0 GiB",
        "weights: 9.0 of 12.0 GiB",
        "weights: 12.0 of 12.0 GiB",
    ]


def test_short_job_logs_nothing(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    job = ProgressLog(log, "graphs: %d of %d", 3)
    for _ in range(3):
        clock[0] += 1
        job.add(1)
    assert not caplog.records
