"""The lag of event loops, seen by a thread beside them."""

import asyncio
import time

import pytest

from pdserve.common.machine import loop_lag
from pdserve.common.machine.loop_lag import Lateness, LoopLag


async def longest(lag: LoopLag, least_s: float) -> float:
    async with asyncio.timeout(20):
        while lag.longest_s() < least_s:
            await asyncio.sleep(0.01)
    return lag.longest_s()


async def test_blocked_loop_is_late() -> None:
    lag = LoopLag(Lateness(asyncio.get_running_loop()))
    lag.start()
    try:
        await asyncio.sleep(0.3)
        before_s = lag.longest_s()
        async with asyncio.timeout(60):
            while lag.longest_s() < before_s + 0.3:  # the thread that looks may be late itself
                time.sleep(before_s + 0.5)
                await asyncio.sleep(0.01)
        assert lag.longest_s() < before_s + 10
    finally:
        lag.close()


async def test_call_that_holds_the_interpreter_is_seen() -> None:
    """Also by the thread beside the loop, which does not run meanwhile."""
    lag = LoopLag(lambda: 0.0)
    lag.start()
    try:
        began_s, number = time.monotonic(), 3
        while time.monotonic() - began_s < 1:  # the last square takes about half of the time
            number *= number
        assert await longest(lag, 0.1) < 10
    finally:
        lag.close()


def test_lag_is_forgotten_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    lates = iter([7.0])
    lag = LoopLag(lambda: next(lates, 0.0))
    lag.start()
    began_s = time.monotonic()
    while lag.longest_s() < 7:
        assert time.monotonic() - began_s < 20
    lag.close()
    monkeypatch.setattr(loop_lag, "KEPT_S", -1)
    assert lag.longest_s() == 0
