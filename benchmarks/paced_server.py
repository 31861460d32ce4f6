"""A decode server whose steps wait as if a GPU computed them, and which reports the CPU time of its threads.

    python -m benchmarks.paced_server front CONFIG FOLDER STEP_MS

Otherwise it is the real server. On SIGUSR1 to the leader, whose process id is in `FOLDER/leader`, it rewrites
`FOLDER/cost`. benchmarks/host_overhead.py uses it.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec

from pdserve.configs.load import parse_config
from pdserve.models.config.sharding import RankTokens
from pdserve.scheduler.engine import leader
from pdserve.scheduler.messages.step import StepRow
from pdserve.scheduler.ranks import builder as rank_builder
from pdserve.scheduler.ranks.executor import Executor, PendingStep
from pdserve.server.launch.frontend import run_frontend


class Cost(msgspec.Struct):
    """Steps and CPU time of a leader so far."""

    threads_s: dict[str, float]
    """CPU time of Python's threads, by name."""
    process_s: float
    steps: int
    rows: int
    last_rows: int
    """Of the latest step."""


class PacedExecutor(Executor):
    """Counts steps, and sleeps in each."""

    step_s = 0.0
    steps = 0
    rows = 0
    last_rows = 0

    def start(self, rows: Sequence[StepRow], ranks: Sequence[RankTokens] | None = None) -> PendingStep:
        step = super().start(rows, ranks)
        cls = type(self)
        cls.steps, cls.rows, cls.last_rows = cls.steps + 1, cls.rows + len(rows), len(rows)
        time.sleep(cls.step_s)
        return step


def read_cost(folder: Path, timeout_s: float = 10.0) -> Cost:
    """Cost of the leader so far."""
    path = folder / "cost"
    path.unlink(missing_ok=True)
    os.kill(int((folder / "leader").read_text()), signal.SIGUSR1)
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the leader has not written {path} within {timeout_s:g} s")
        time.sleep(0.001)
    return msgspec.json.decode(path.read_bytes(), type=Cost)


def _lead(folder: Path, step_s: float) -> int:
    def write(_number: int, _frame: FrameType | None) -> None:
        threads_s = {
            thread.name: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            for thread in threading.enumerate()
            if thread.ident is not None
        }
        cost = Cost(
            threads_s, time.process_time(), PacedExecutor.steps, PacedExecutor.rows, last_rows=PacedExecutor.last_rows
        )
        (folder / "unfinished").write_bytes(msgspec.json.encode(cost))
        (folder / "unfinished").rename(folder / "cost")

    PacedExecutor.step_s = step_s
    rank_builder.Executor = PacedExecutor  # type: ignore[attr-defined]  # the name that it is made by
    signal.signal(signal.SIGUSR1, write)
    (folder / "leader").write_text(str(os.getpid()))
    return leader.main()


def main() -> int:
    part, config, folder, step_ms = sys.argv[1:]
    if part == "leader":
        return _lead(Path(folder), float(step_ms) / 1000)
    (Path(folder) / "front").write_text(str(os.getpid()))
    command = (sys.executable, "-m", "benchmarks.paced_server", "leader", config, folder, step_ms)
    return run_frontend(parse_config(json.loads(Path(config).read_bytes())), command)


if __name__ == "__main__":
    sys.exit(main())
