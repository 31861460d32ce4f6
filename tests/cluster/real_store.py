"""A real KV store for tests, which can be killed, filled and corrupted."""

import ctypes
import importlib
import mmap
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from pdserve.transfer.store.client import MooncakeClient
from pdserve.transfer.store.codec import HEADER_BYTES
from tests.cluster.servers import HTTP, ForkedCommand, start_forked, wait_until
from tests.ports import free_port
from tests.processes import stop_process

CLIENT_BYTES = 1 << 20
"""Buffer of a client; values of servers are smaller."""


class Store:
    """`pdserve store`: a master that lends memory itself, and members that lend more. It can be started again at the
    same address.
    """

    def __init__(self) -> None:
        self._port, self._metrics_port = free_port(), free_port()
        self._master: ForkedCommand | None = None
        self._members: list[ForkedCommand] = []

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self._port}"

    @property
    def running(self) -> bool:
        return self._master is not None

    def start(self, memory: str = "64MiB") -> None:
        """Start the master; returns when its memory is mounted."""
        ports = ("--port", str(self._port), "--metrics-port", str(self._metrics_port))
        self._master = ForkedCommand("store", *ports, "--memory", memory)
        self._wait_segments(1)

    def add_member(self) -> ForkedCommand:
        """Start a process that lends memory and has no master."""
        self._members.append(ForkedCommand("store", "--join", self.url, "--memory", "64MiB"))
        self._wait_segments(2)
        return self._members[-1]

    def kill(self) -> None:
        """SIGKILL, first to the master, so that it stops in the middle of requests."""
        command, self._master = self._master, None
        if command is None:
            return
        process = command.process
        if process.poll() is None:
            stop_process(process.pid)
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
        end(command)

    def close(self) -> None:
        self.kill()
        for member in self._members:
            end(member)

    def flip_bits(self) -> None:
        """Change one bit of every value."""
        keys = self._ask("get_all_keys").split()
        assert keys
        self._run("flip", *keys)

    def fill(self) -> None:
        """Fill the memory with values that cannot be evicted."""
        self._run("fill")

    def _wait_segments(self, count: int) -> None:
        def mounted() -> bool:
            try:
                return len(self._ask("get_all_segments").split()) >= count
            except httpx.TransportError:
                return False

        wait_until(mounted, 60, f"a store with {count} segments")

    def _run(self, function: str, *keys: str) -> None:
        """Run a function of this file in a process with a client."""
        process, stdin, stdout = start_forked(f"{__name__}:{function}", self.url)
        with stdout:
            with stdin:
                stdin.write(" ".join(keys))
            assert process.wait(60) == 0

    def _ask(self, path: str) -> str:
        return HTTP.get(f"http://127.0.0.1:{self._metrics_port}/{path}", timeout=5).text


def end(command: ForkedCommand) -> None:
    """SIGKILL, and wait for its end."""
    command.process.kill()
    command.process.wait(10)
    command.close()


class Client:
    """A client of the store, in a process of its own."""

    def __init__(self, url: str) -> None:
        self.memory = mmap.mmap(-1, CLIENT_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._client = MooncakeClient(url, "127.0.0.1", address, CLIENT_BYTES)

    def get(self, key: str) -> int:
        (size,) = self._client.get([key], [0], [CLIENT_BYTES])
        return size

    def put(self, key: str, size: int) -> bool:
        (stored,) = self._client.put([key], [0], [size])
        return stored

    def put_pinned(self, key: str, size: int) -> bool:
        config = importlib.import_module("mooncake.store").ReplicateConfig()
        config.with_hard_pin = True
        return bool(self._client._store.batch_put_from([key], [self._client._address], [size], config) == [0])

    def remove(self, key: str) -> None:
        self._client.remove([key])


def flip(arguments: Sequence[str]) -> int:
    client = Client(*arguments)
    for key in sys.stdin.read().split():
        size = client.get(key)
        client.memory[HEADER_BYTES + (size - HEADER_BYTES) // 2] ^= 4
        client.remove(key)
        assert client.put(key, size), f"{key} was not stored again"
    os._exit(0)  # without Mooncake's destructors


def fill(arguments: Sequence[str]) -> int:
    client = Client(*arguments)
    count = 0
    for size in (CLIENT_BYTES, CLIENT_BYTES // 16, CLIENT_BYTES // 256):
        while client.put_pinned(f"fill/{count}", size):
            count += 1
    assert count > 0
    os._exit(0)
