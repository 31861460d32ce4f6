"""Requests that hold the event loop are named in the log."""

import logging
import time

import pytest

from pdserve.server.observability.loop_work import LONG_S, READ_S, LoopWork


def work_for(seconds: float) -> None:
    began_s = time.thread_time()
    while time.thread_time() - began_s < seconds:
        pass


def test_long_work_is_logged_once_per_request(caplog: pytest.LogCaptureFixture) -> None:
    scope = {"path": "/generate"}
    LoopWork.begin(scope, 1234)
    with caplog.at_level(logging.WARNING):
        for what in ("parsing", "output"):
            began_at = LoopWork.begin_piece()
            work_for(LONG_S + 0.01)
            LoopWork.of(scope).ended(what, began_at)
    (line,) = caplog.messages
    assert line.startswith('parsing of a request of 1234 bytes to "/generate" held the event loop for ')


def test_time_of_other_processes_is_not_blamed_on_a_request(caplog: pytest.LogCaptureFixture) -> None:
    began_at = LoopWork.begin_piece()
    time.sleep(LONG_S + 0.01)
    LoopWork.of({"path": "/generate"}).ended("parsing", began_at)
    assert not caplog.messages


def test_earlier_work_is_not_blamed_on_a_request(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):  # the CPU time is not read again between two short pieces
        began_at = LoopWork.begin_piece()
        work_for(0.6 * LONG_S)
        LoopWork.of({"path": "/generate"}).ended("parsing", began_at)
    assert not caplog.messages


def test_long_work_right_after_short_work_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    LoopWork.begin_piece()
    began_at = LoopWork.begin_piece()
    work_for(LONG_S + READ_S)
    LoopWork.of({"path": "/generate"}).ended("parsing", began_at)
    assert len(caplog.messages) == 1
