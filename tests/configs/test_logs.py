"""Lines that strangers can cause are bounded."""

import logging

import pytest

from pdserve.configs.logs import RateLimitedLog

logger = logging.getLogger("test-logs")


def test_one_line_per_interval_with_the_number_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    limited = RateLimitedLog(logger, interval_s=1.0, clock=lambda: now[0])
    for number in range(5):
        limited.warning("noise %d of %s", number, "10.0.0.1")
    now[0] += 0.999
    limited.warning("noise that comes too soon")
    assert [record.getMessage() for record in caplog.records] == ["noise 0 of 10.0.0.1"]
    now[0] += 0.001
    limited.warning("noise at last, 100 %")
    assert caplog.records[-1].getMessage() == "noise at last, 100 % (5 more of this kind since the last such line)"
    now[0] += 1.0
    limited.warning("nothing in between")
    assert caplog.records[-1].getMessage() == "nothing in between"


def test_exceptions_come_with_their_traceback(caplog: pytest.LogCaptureFixture) -> None:
    limited = RateLimitedLog(logger, clock=lambda: 0.0)
    for _ in range(2):
        try:
            raise ValueError("broken")
        except ValueError:
            limited.exception("a message could not be handled")
    assert caplog.text.count("ValueError: broken") == 1
    assert caplog.records[0].levelno == logging.ERROR
