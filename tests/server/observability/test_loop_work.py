"""Requests that hold the event loop are named in the log."""

import logging
import time

import pytest

from pdserve.server.observability.loop_work import LONG_S, LoopWork


def work_for(seconds: float) -> None:
    began_s = time.thread_time()
    while time.thread_time() - began_s < seconds:
        pass


def test_long_work_is_logged_once_per_request(caplog: pytest.LogCaptureFixture) -> None:
    scope = {"path": "/generate"}
    LoopWork.begin(scope, 1234)
    with caplog.at_level(logging.WARNING):
        for what in ("parsing", "output"):
            began_s = time.thread_time()
            work_for(LONG_S + 0.01)
            LoopWork.of(scope).ended(what, began_s)
    (line,) = caplog.messages
    assert line.startswith('parsing of a request of 1234 bytes to "/generate" held the event loop for ')


def test_time_of_other_processes_is_not_blamed_on_a_request(caplog: pytest.LogCaptureFixture) -> None:
    began_s = time.thread_time()
    time.sleep(LONG_S + 0.01)
    LoopWork.of({"path": "/generate"}).ended("parsing", began_s)
    assert not caplog.messages
