"""Rate limit for log messages that unauthenticated clients can cause, and log lines in JSON."""

import json
import logging
import sys

import pytest

from pdserve.configs.logs import CLIENT_LOGGERS, JsonFormatter, RateLimit, configure_logging, rate_limited

logger = logging.getLogger("test-logs")


def test_rate_limited_exception_is_logged_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    limited = rate_limited(logger, clock=lambda: 0.0)
    for _ in range(2):
        try:
            raise ValueError("broken")
        except ValueError:
            limited.exception("a message could not be handled")
    assert caplog.text.count("ValueError: broken") == 1
    assert caplog.records[0].levelno == logging.ERROR


def test_message_template_is_logged_once_a_second_with_the_number_of_dropped_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    logger = logging.Logger("test")
    logger.addHandler(caplog.handler)
    logger.addFilter(RateLimit(lambda: now))
    for _ in range(100):
        logger.warning("client %s is malformed", "a")
    logger.warning("something else")
    now = 0.99
    logger.warning("client %s is malformed", "b")
    now = 1.0
    logger.warning("client %s is malformed", "c")
    now = 5.0
    logger.warning("client %s is malformed", "d")
    assert caplog.messages == [
        "client a is malformed",
        "something else",
        "client c is malformed (100 more since the last such line)",
        "client d is malformed",
    ]


@pytest.mark.parametrize("name", CLIENT_LOGGERS)
def test_loggers_of_the_http_port_are_rate_limited(name: str) -> None:
    root, logger = logging.getLogger(), logging.getLogger(name)
    level, handlers, filters = root.level, root.handlers[:], logger.filters[:]
    try:
        configure_logging("info", "decode")
        assert any(isinstance(limit, RateLimit) for limit in logger.filters)
    finally:
        root.setLevel(level)
        root.handlers[:], logger.filters[:] = handlers, filters


def test_json_lines_have_time_role_and_request_ids() -> None:
    record = logging.makeLogRecord(
        {
            "name": "pdserve.frontend",
            "levelname": "WARNING",
            "msg": "request %s failed",
            "args": ("r1",),
            "created": 1_800_000_000.25,
            "rid": "r1",
            "request_id": None,
        }
    )
    assert json.loads(JsonFormatter("decode").format(record)) == {
        "time": "2027-01-15T08:00:00.250Z",
        "level": "warning",
        "role": "decode",
        "logger": "pdserve.frontend",
        "message": "request r1 failed",
        "rid": "r1",
    }


def test_json_lines_are_single_lines_with_the_traceback() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.getLogger("x").makeRecord("x", logging.ERROR, "f", 1, "text\nmore", (), sys.exc_info())
    line = JsonFormatter("prefill").format(record)
    assert "\n" not in line
    assert "ValueError: two\nlines" in json.loads(line)["exception"]
