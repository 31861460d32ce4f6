"""Starts the leader process with its configuration on stdin, watches it, and stops it in bounded time.

The leader always ends with its frontend: its stdin is a pipe whose other end only the frontend holds. The leader reads
end-of-file when the frontend has ended, for whatever reason.
"""

import asyncio
import contextlib
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from ...common.words import OUT_OF_MEMORY
from ...configs.load import revealed_dict
from ...configs.schema import AnyServerConfig
from ...scheduler.ranks.process import thread_environ

log = logging.getLogger("pdserve.frontend")

# -P keeps the working directory out of sys.path: in a checkout its folders have the names of other packages.
LEADER_COMMAND = (sys.executable, "-P", "-m", "pdserve.scheduler.engine.leader")
SPIN_COUNTS = {"x86_64": "1000", "aarch64": "40000"}
"""How often idle OpenMP threads poll before they sleep (GOMP_SPINCOUNT): for about 40 us, longer than the host takes
between two operations of a step. A poll takes 0.85 ns on a Neoverse N1 and 45 ns (the instruction `pause`) on recent
Intel CPUs. Spinning for a millisecond is 10% faster on an idle machine and several times slower on a busy one, where
spinning threads take the cores from the thread that they wait for."""
KILL_GRACE_S = 1.0
"""How long the end of a killed process is awaited."""


class LeaderProcess:
    """Owns the process and the write end of its stdin. Created on the event loop that waits for its exit."""

    def __init__(self, config: AnyServerConfig, frontend_address: str, command: Sequence[str]) -> None:
        # Its own process group: Ctrl-C in a terminal reaches only the frontend, which then drains the leader.
        spin_count = SPIN_COUNTS.get(platform.machine(), SPIN_COUNTS["x86_64"])
        environment = {"GOMP_SPINCOUNT": spin_count, **os.environ, **thread_environ(config)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0, env=environment)
        self._exited = asyncio.Event()
        self._killed = False
        """This process has sent it SIGKILL."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), name="leader-watch", daemon=True).start()
        introduction = json.dumps({"config": revealed_dict(config), "frontend": frontend_address})
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has exited already; the watcher reports it
            self._process.stdin.write(introduction.encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """As in subprocess: negative for a signal, None while the process runs."""
        return self._process.returncode if self._exited.is_set() else None

    def describe_exit(self) -> str:
        status = self.exit_status
        if status is None:
            return f"process {self.pid} still runs"
        if status >= 0:
            return f"process {self.pid} exited with status {status}"
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        cause = OUT_OF_MEMORY if -status == signal.SIGKILL and not self._killed else ""
        return f"process {self.pid} was ended by {name}{cause}"

    async def wait(self) -> int:
        """Wait for the exit status."""
        await self._exited.wait()
        return self._process.returncode

    async def stop(self, patience_s: float) -> int | None:
        """Wait `patience_s` for the process to exit by itself, then kill it.

        Returns None when it has not ended even then: a process with much pinned memory can stay in the kernel for
        minutes after SIGKILL, and the frontend does not wait for it.
        """
        for deadline_s in (patience_s, KILL_GRACE_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    return await self.wait()
            if patience_s > 0 and not self._killed:  # one without patience was not asked to exit
                log.warning("leader process %d has not exited in %g s; sending SIGKILL", self.pid, patience_s)
            self.kill()
        log.error("leader process %d has not exited %g s after SIGKILL; not waiting for it", self.pid, KILL_GRACE_S)
        return None

    def kill(self) -> None:
        """Send SIGKILL without waiting."""
        if not self._exited.is_set():
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def close(self) -> None:
        """Close the leader's stdin. A leader that still runs then exits."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits for the status
            loop.call_soon_threadsafe(self._exited.set)
