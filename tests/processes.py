"""Processes that tests stop, and wait for."""

import os
import signal
import time
from pathlib import Path


def stop_process(pid: int) -> None:
    """SIGSTOP. Returns when no thread of the process runs any more: on a busy machine some go on for milliseconds."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while any(_state(task / "stat") not in ("T", "Z", None) for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def gone(pid: int) -> bool:
    """Ended, whether or not its new parent has collected it yet."""
    return _state(Path(f"/proc/{pid}/stat")) in ("Z", None)


def _state(stat: Path) -> str | None:
    """One letter of the kernel's, such as R for running and T for stopped; None when there is no such process."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
