"""A prefill rank in its own process, for tests: holds its part of the KV, writes chunks on command, reports each.

It reads a Setup and then a ChunkWrite per line, and prints a ChunkWritten for each; lines are msgpack in hexadecimal.
"""

import queue
import signal
import sys
from collections.abc import Sequence

import msgspec

from pdserve.configs.schema import PrefillConfig
from pdserve.transfer.data.chunk_writer import ChunkWriter
from pdserve.transfer.data.chunks import ChunkWrite, ChunkWritten
from pdserve.transfer.protocol.messages import Hello, Welcome
from tests.cluster.servers import start_forked
from tests.processes import stop_process
from tests.transfer.data.kv_cells import filled_pool, kv_of


class Setup(msgspec.Struct, array_like=True):
    """The rank, its peers, and its KV: `kv_of(*shape, seed=seed)` in these pages."""

    rank: int
    hello: Hello
    welcome: Welcome
    shape: tuple[int, int, int]
    seed: int
    pages: list[int]


class WriterProcess:
    """Starts the process: it writes the chunks that are submitted and reports each. Call close() or kill()."""

    def __init__(self, setup: Setup) -> None:
        self._process, self._stdin, self._stdout = start_forked(f"{__name__}:main")
        self._say(setup)

    def submit(self, chunk: ChunkWrite) -> None:
        self._say(chunk)

    def report(self) -> ChunkWritten:
        return msgspec.msgpack.decode(bytes.fromhex(self._stdout.readline()), type=ChunkWritten)

    def stop(self) -> None:
        """Stop the process (SIGSTOP), and return once it is stopped."""
        stop_process(self._process.pid)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> int:
        """Make the process exit. Returns the exit code."""
        self._close_pipes()
        return self._process.wait(timeout=60)

    def kill(self) -> None:
        self._close_pipes()
        self._process.kill()
        self._process.wait()

    def _close_pipes(self) -> None:
        self._stdin.close()
        self._stdout.close()

    def _say(self, message: object) -> None:
        self._stdin.write(msgspec.msgpack.encode(message).hex() + "\n")
        self._stdin.flush()


def main(_arguments: Sequence[str]) -> int:
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
    return 0
