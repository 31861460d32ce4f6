"""Grammars of clients at a real server: turns of two addresses, and a compiler that is killed, stopped or out of memory
while requests wait. The leader is a scripted program.
"""

import asyncio
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.servers import wait_until
from tests.server.http_harness import write_byte_model
from tests.server.launch.test_frontend_process import AUTHORIZED, RunningFrontend, frontend

WAITING = 20
PATIENCE_S = 120
SMALL_S = 2.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFrontend]:
    model, temp = (tmp_path_factory.mktemp(name) for name in ("bytes", "temp"))
    with frontend(write_byte_model(model), temp, "serve") as running:
        running.wait_healthy()
        yield running
        running.process.send_signal(signal.SIGTERM)
        _, log = running.end(within_s=60)
        assert "Traceback" not in log


def schema(name: str, properties: int) -> dict[str, Any]:
    """With 8,000 properties, takes 13 s to compile, and with 1,600 half a second."""
    return {"type": "object", "properties": {f"{name}{number}": {} for number in range(properties)}}


def client(running: RunningFrontend, address: str) -> httpx.AsyncClient:
    """A client with this address, and as many connections as it has requests."""
    transport = httpx.AsyncHTTPTransport(local_address=address, limits=httpx.Limits(max_connections=None))
    return httpx.AsyncClient(base_url=running.url, headers=AUTHORIZED, timeout=PATIENCE_S, transport=transport)


async def generate(http: httpx.AsyncClient, **sampling: object) -> int:
    answer = await http.post("/generate", json={"text": "a", "sampling_params": sampling | {"max_new_tokens": 2}})
    return answer.status_code


def children_of(process: int) -> list[int]:
    lists = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for children in lists for child in children.read_text().split()]


def compiler_of(running: RunningFrontend) -> int:
    for child in children_of(running.process.pid):
        if b"grammar.check" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise AssertionError("no grammar compiler")


async def test_small_schema_beside_large_ones_of_another_address(running: RunningFrontend) -> None:
    async with client(running, "127.0.0.1") as many, client(running, "127.0.0.2") as other:
        assert await generate(other, regex="a+") == 200  # the compiler has started
        large = [asyncio.create_task(generate(many, json_schema=schema(f"{n}_", 8000))) for n in range(40)]
        times: list[float] = []
        async with asyncio.timeout(60):
            while not children_of(compiler_of(running)):
                await asyncio.sleep(0.005)
        for number in range(3):
            began = time.monotonic()
            assert await generate(other, json_schema=schema(f"small{number}", 3)) == 200
            times.append(time.monotonic() - began)
        assert sum(not one.done() for one in large) > 30, "large ones wait"
        print(f"small schemas: {', '.join(f'{one:.3f} s' for one in times)}")
        assert min(times) < SMALL_S
        for one in large:
            one.cancel()
        await asyncio.gather(*large, return_exceptions=True)
    # their clients have left: only what was being compiled ends
    wait_until(lambda: not children_of(compiler_of(running)), 60, "nothing is compiled")


@pytest.mark.parametrize(
    ("fault", "victim"),
    [
        ("killed", "compiler"),  # also what the kernel does when the machine has no memory left
        ("stopped", "compiler"),
        ("killed", "compilation"),
        ("stopped", "compilation"),
        ("out of memory", "compilation"),
    ],
)
async def test_requests_that_wait_are_answered(running: RunningFrontend, fault: str, victim: str) -> None:
    name = f"{fault} {victim}"
    async with client(running, "127.0.0.1") as http:
        assert await generate(http, regex="a") == 200
        compiler = compiler_of(running)
        slow = asyncio.create_task(generate(http, json_schema=schema(name, 1600)))
        async with asyncio.timeout(60):
            while not (compilations := children_of(compiler)):
                await asyncio.sleep(0.005)
        others = [generate(http, json_schema=schema(f"{name} {number}", 3)) for number in range(WAITING)]
        waiting = asyncio.gather(slow, *others)
        process = compiler if victim == "compiler" else compilations[0]
        if fault == "out of memory":
            pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[0])
            limit = pages * resource.getpagesize()
            resource.prlimit(process, resource.RLIMIT_AS, (limit, limit))
        else:
            os.kill(process, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        statuses = await waiting
        assert statuses == [400 if fault == "out of memory" else 200] + WAITING * [200]
        assert await generate(http, json_schema=schema(f"{name} after", 3)) == 200
        assert (compiler_of(running) != compiler) == (victim == "compiler")
