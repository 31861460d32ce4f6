"""What strangers can cause is logged once a second."""

import logging

import pytest

from pdserve.configs.logs import STRANGERS, OncePerSecond, configure_logging


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
