"""A real decode-like process for tests: it owns a receive engine and one registered pool, and can be stopped or killed.

The pool is a shared mapping, so the test sees every byte that lands in it, also while the process is stopped or dead.
"""

import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from pdserve.transfer.mooncake.sockets import Region
from tests.processes import stop_process

REPOSITORY = Path(__file__).parents[3]


class Receiver:
    """Starts the process; `pool` is its memory, `session` and `base_address` are its published addresses."""

    def __init__(self, size_bytes: int) -> None:
        self._file = tempfile.NamedTemporaryFile(dir="/dev/shm")  # noqa: SIM115 (closed in close())
        self._file.truncate(size_bytes)
        self.pool: NDArray[np.uint8] = np.memmap(self._file.name, dtype=np.uint8, mode="r+")
        self.size_bytes = size_bytes
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close())
        path = filter(None, (str(REPOSITORY / ".dev"), str(REPOSITORY), os.environ.get("PYTHONPATH")))
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._file.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], 30)[0], "the receiver did not start"
        answer = self._process.stdout.readline().decode().split()
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
        """Let the process close its engine and end by itself; its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(timeout=60)

    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode()

    def close(self) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout, self._stderr, self._file):
            if stream is not None:
                stream.close()


def main() -> None:
    from pdserve.transfer.mooncake.engine import ReceiveEngine

    pool = np.memmap(sys.argv[1], dtype=np.uint8, mode="r+")
    engine = ReceiveEngine("127.0.0.1")
    engine.register(pool.ctypes.data, pool.nbytes)
    print(engine.session, pool.ctypes.data, flush=True)
    sys.stdin.read()
    engine.close()


if __name__ == "__main__":
    main()
