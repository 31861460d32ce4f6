"""What strangers can cause is logged once a second."""

import logging

import pytest

from pdserve.configs.logs import STRANGERS, OncePerSecond, RateLimitedLog, configure_logging

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


def test_a_message_passes_once_a_second_and_the_next_one_counts(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    logger = logging.Logger("test")
    logger.addHandler(caplog.handler)
    logger.addFilter(OncePerSecond(lambda: now))
    for _ in range(100):
        logger.warning("client %s talks nonsense", "a")
    logger.warning("something else")
    now = 0.99
    logger.warning("client %s talks nonsense", "b")
    now = 1.0
    logger.warning("client %s talks nonsense", "c")
    now = 5.0
    logger.warning("client %s talks nonsense", "d")
    assert caplog.messages == [
        "client a talks nonsense",
        "something else",
        "client c talks nonsense (100 more since the last such line)",
        "client d talks nonsense",
    ]


@pytest.mark.parametrize("name", STRANGERS)
def test_the_http_port_is_limited(name: str) -> None:
    root, logger = logging.getLogger(), logging.getLogger(name)
    level, handlers, filters = root.level, root.handlers[:], logger.filters[:]
    try:
        configure_logging("info", "decode")
        assert any(isinstance(limit, OncePerSecond) for limit in logger.filters)
    finally:
        root.setLevel(level)
        root.handlers[:], logger.filters[:] = handlers, filters
