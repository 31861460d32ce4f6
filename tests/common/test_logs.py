"""Rate limit for log messages that unauthenticated clients can cause, log lines in JSON, and a log that is not read."""

import json
import logging
import os
import sys
import time

import pytest

from pdserve.common.logs import (
    CLIENT_LOGGERS,
    DroppingHandler,
    JsonFormatter,
    RateLimit,
    configure_logging,
    rate_limited,
)

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


@pytest.mark.parametrize("length", [100, 3000, 20_000])
def test_lines_that_nobody_reads_are_dropped_and_counted(length: int) -> None:
    reading, writing = os.pipe()
    handler = DroppingHandler(writing)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    try:
        began = time.monotonic()
        for number in range(2000):
            logger.info("%d %s", number, "x" * length)
        assert time.monotonic() - began < 5
        assert handler.dropped > 100
        dropped = handler.dropped
        read = os.read(reading, 1 << 20).decode()
        while not read.endswith("read"):
            logger.info("read")
            read += os.read(reading, 1 << 20).decode().removesuffix("\n")
        lines = read.splitlines()
        written = 2000 - dropped
        assert lines[: written - 1] == [f"{number} {'x' * length}" for number in range(written - 1)]
        assert lines[-2:] == [f"{dropped} log lines were dropped: nobody has read the log", "read"]
        assert handler.dropped == 0
        assert handler.dropped_in_all >= dropped
    finally:
        handler.close()
        os.close(reading)
        os.close(writing)


def test_log_whose_reader_has_gone_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    handler = DroppingHandler(writing)
    os.close(reading)
    try:
        handler.emit(logging.makeLogRecord({"msg": "lost"}))
        assert handler.dropped == 1
        assert capfd.readouterr().err == ""
    finally:
        handler.close()
        os.close(writing)
