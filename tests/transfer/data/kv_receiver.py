"""A process that receives KV like a decode rank: a receive engine and one registered pool. Tests stop and kill it.

The pool is shared memory, so the test sees every byte that is written to it, also while the process is stopped or dead.
"""

import select
import signal
import sys
import tempfile
from collections.abc import Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from pdserve.transfer.mooncake.sockets import Region
from tests.cluster.servers import start_forked
from tests.processes import stop_process


class Receiver:
    """Starts the process; `pool` is its memory, `session` and `base_address` are its published addresses."""

    def __init__(self, size_bytes: int) -> None:
        self._file = tempfile.NamedTemporaryFile(dir="/dev/shm")  # noqa: SIM115 (closed in close())
        self._file.truncate(size_bytes)
        self.pool: NDArray[np.uint8] = np.memmap(self._file.name, dtype=np.uint8, mode="r+")
        self.size_bytes = size_bytes
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close())
        self._process, self._stdin, self._stdout = start_forked(
            f"{__name__}:main", self._file.name, stderr=self._stderr
        )
        assert select.select([self._stdout], [], [], 30)[0], "the receiver did not start"
        answer = self._stdout.readline().split()
        assert len(answer) == 2, f"the receiver failed: {self.stderr()}"
        self.session = answer[0]
        self.base_address = int(answer[1])
        self.region = Region(self.base_address, size_bytes)

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stop(self) -> None:
        """Stop the process (SIGSTOP), and return once it is stopped."""
        stop_process(self._process.pid)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def leave(self) -> int:
        """Make the process close its engine and exit. Returns the exit code."""
        self._stdin.close()
        return self._process.wait(timeout=60)

    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode()

    def close(self) -> None:
        self.kill()
        for stream in (self._stdin, self._stdout, self._stderr, self._file):
            stream.close()


def main(arguments: Sequence[str]) -> int:
    from pdserve.transfer.mooncake.engine import ReceiveEngine

    pool = np.memmap(arguments[0], dtype=np.uint8, mode="r+")
    engine = ReceiveEngine("127.0.0.1")
    engine.register(pool.ctypes.data, pool.nbytes)
    print(engine.session, pool.ctypes.data, flush=True)
    sys.stdin.read()
    engine.close()
    return 0
