"""A prefill rank in its own process, for tests: holds its part of the KV, writes chunks on command, reports each.

In and out are lines of hexadecimal msgpack: first a Setup, then a ChunkWrite per line; a ChunkWritten for each.
"""

import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from pdserve.configs.schema import PrefillConfig
from pdserve.transfer.data.chunk_writer import ChunkWriter
from pdserve.transfer.data.chunks import ChunkWrite, ChunkWritten
from pdserve.transfer.protocol.messages import Hello, Welcome
from tests.processes import stop_process
from tests.transfer.data.kv_cells import filled_pool, kv_of

REPOSITORY = Path(__file__).parents[3]


class Setup(msgspec.Struct, array_like=True):
    """The rank, its peers, and its KV: `kv_of(*shape, seed=seed)` in these pages."""

    rank: int
    hello: Hello
    welcome: Welcome
    shape: tuple[int, int, int]
    seed: int
    pages: list[int]


class WriterProcess:
    """Starts the process; write() sends it a chunk and returns its report."""

    def __init__(self, setup: Setup) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{REPOSITORY / '.dev'}:{REPOSITORY}"},
            text=True,
        )
        self._say(setup)

    def submit(self, chunk: ChunkWrite) -> None:
        self._say(chunk)

    def report(self) -> ChunkWritten:
        assert self._process.stdout is not None
        return msgspec.msgpack.decode(bytes.fromhex(self._process.stdout.readline()), type=ChunkWritten)

    def stop(self) -> None:
        """Stop the process (SIGSTOP)."""
        stop_process(self._process.pid)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> int:
        """Let the process end by itself; its exit code."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        return self._process.wait(timeout=60)

    def _say(self, message: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.msgpack.encode(message).hex() + "\n")
        self._process.stdin.flush()


def main() -> None:
    setup = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=Setup)
    (pool,) = setup.welcome.ranks[setup.rank].pools
    source = filled_pool(pool.layout, kv_of(*setup.shape, seed=setup.seed), setup.pages)
    reports: queue.SimpleQueue[ChunkWritten] = queue.SimpleQueue()
    writer = ChunkWriter(setup.rank, [source], PrefillConfig(), local_rank=0, on_written=reports.put)
    writer.open(setup.hello, setup.welcome)
    for line in sys.stdin:
        writer.write(msgspec.msgpack.decode(bytes.fromhex(line), type=ChunkWrite))
        print(msgspec.msgpack.encode(reports.get(timeout=20)).hex(), flush=True)
    writer.close_all()


if __name__ == "__main__":
    main()
