"""Signals of the frontend: a copy of a signal is ignored."""

import signal
import time
from unittest.mock import Mock

import pytest

from pdserve.server.launch.frontend import Frontend
from pdserve.server.launch.signals import COPY_S


def test_copy_of_a_signal_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends SIGTERM twice. A second signal would end the drain at once."""
    now = Mock(return_value=100.0)
    monkeypatch.setattr(time, "monotonic", now)
    frontend = Frontend(Mock(), Mock(), (), None)

    def received(number: signal.Signals) -> int:
        frontend._on_signal(number)
        return frontend._signals.qsize()

    assert received(signal.SIGTERM) == 1
    assert received(signal.SIGTERM) == 1
    assert received(signal.SIGINT) == 2, "a different signal is not a copy"
    now.return_value += 2 * COPY_S
    assert received(signal.SIGTERM) == 3
