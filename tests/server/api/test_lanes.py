"""Lanes: long request bodies are parsed in separate threads and delay only other long bodies."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from pdserve.common.errors import OverloadedError
from pdserve.server.api.service import lanes as lanes_module
from pdserve.server.api.service.lanes import INLINE_BYTES, LONG_BYTES, Lanes

ResultT = TypeVar("ResultT")

SHORT, MEDIUM, LONG = b"x" * INLINE_BYTES, b"x" * LONG_BYTES, b"x" * (LONG_BYTES + 1)


class Client:
    """A client that has sent a body, and may disconnect."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    @property
    def request(self) -> Request:
        return Request({"type": "http", "headers": []}, self._receive)

    async def _receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}


class Held:
    """A `parse` function that blocks until it is released and records the sizes of bodies."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()
        self.parsed: list[int] = []

    def __call__(self, body: bytes) -> int:
        self.begun.release()
        assert self.go.wait(20)
        self.parsed.append(len(body))
        return len(body)


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads of a lane follows from that of the CPUs."""
    monkeypatch.setattr(lanes_module, "usable_cpus", lambda: 2)


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    held = Held()
    yield held
    held.go.set()


async def begun(held: Held) -> None:
    async with asyncio.timeout(10):
        while not held.begun.acquire(blocking=False):
            await asyncio.sleep(0.001)


def start(
    lanes: Lanes, body: bytes, parse: Callable[[bytes], ResultT], *, is_prompt: bool = True
) -> "asyncio.Task[ResultT]":
    return asyncio.create_task(lanes.run(Client().request, body, parse, is_prompt=is_prompt))


def new_lanes(max_parsing_bytes: int = 64 << 20) -> Lanes:
    return Lanes(max_parsing_bytes)


async def test_long_bodies_delay_only_long_bodies(held: Held) -> None:
    lanes = new_lanes()
    long = [start(lanes, LONG, held) for _ in range(8)]
    await begun(held)
    assert await asyncio.wait_for(start(lanes, SHORT, len), 10) == INLINE_BYTES
    assert await asyncio.wait_for(start(lanes, MEDIUM, len), 10) == LONG_BYTES
    assert await asyncio.wait_for(start(lanes, LONG, len, is_prompt=False), 10) == LONG_BYTES + 1
    assert not any(task.done() for task in long)
    held.go.set()
    assert await asyncio.gather(*long) == [LONG_BYTES + 1] * 8


async def test_full_lane_refuses_a_body(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "MOST_WAITING", 3)
    lanes = new_lanes()
    waiting = [start(lanes, LONG, held) for _ in range(3)]
    await begun(held)
    with pytest.raises(OverloadedError, match=r"3 long request bodies are being parsed \(limit 3\)"):
        await start(lanes, LONG, len)
    held.go.set()
    await asyncio.gather(*waiting)
    assert await start(lanes, LONG, len) == LONG_BYTES + 1


async def test_bodies_of_all_lanes_share_a_budget(held: Held) -> None:
    lanes = new_lanes(len(LONG) + len(MEDIUM))
    waiting = [start(lanes, LONG, held), start(lanes, MEDIUM, held)]
    await begun(held)
    with pytest.raises(OverloadedError, match=rf"this one has {len(MEDIUM)} bytes \(limit .*: max_parsing_bytes\)"):
        await start(lanes, MEDIUM, len)
    assert await start(lanes, SHORT, len) == len(SHORT)
    held.go.set()
    await asyncio.gather(*waiting)
    assert await start(lanes, MEDIUM, len) == len(MEDIUM)


async def test_one_body_may_be_larger_than_the_budget() -> None:
    assert await start(new_lanes(1024), LONG, len) == len(LONG)


async def test_body_is_not_parsed_after_a_disconnect(held: Held) -> None:
    lanes, client = new_lanes(), Client()
    first = start(lanes, LONG, held)
    await begun(held)
    second = asyncio.create_task(lanes.run(client.request, LONG + b"x", held))
    await asyncio.sleep(0.01)
    client.left.set()
    with pytest.raises(ClientDisconnect):
        await second
    held.go.set()
    await first
    assert await start(lanes, LONG, len) == LONG_BYTES + 1
    assert held.parsed == [LONG_BYTES + 1]


async def test_memory_of_long_bodies_is_returned_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[bool] = []
    monkeypatch.setattr(lanes_module, "_trim", lambda: trims.append(True))
    lanes = new_lanes()
    for body, expected in ((SHORT, 0), (MEDIUM, 0), (LONG, 1)):
        await start(lanes, body, len)
        assert len(trims) == expected
    with pytest.raises(ZeroDivisionError):
        await start(lanes, LONG, lambda _body: 1 // 0)
    assert len(trims) == 2
