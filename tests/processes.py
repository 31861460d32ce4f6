"""Stopping processes, and waiting for their end."""

import os
import signal
import time
from pathlib import Path

RUN_VARIABLE = "PDSERVE_TEST_RUN"
"""Environment variable with the id of a test run, the same for all its workers."""


def stop_process(pid: int) -> None:
    """Send SIGSTOP. Returns when all threads have stopped, which takes milliseconds on a busy machine."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while any(_state(task / "stat") not in ("T", "Z", None) for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def gone(pid: int) -> bool:
    """Whether the process has ended, reaped or not."""
    return _state(Path(f"/proc/{pid}/stat")) in ("Z", None)


def _state(stat: Path) -> str | None:
    """The state letter of the kernel, such as R (running) or T (stopped); None when there is no such process."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
