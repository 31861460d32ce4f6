"""The leader engine process: started with its configuration on stdin, watched, and stopped within a bound.

The leader dies with its front in every case: its stdin is a pipe that only the front holds, and end of file on it means
that the front has gone, however it went.
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
from collections.abc import Mapping, Sequence

from ...configs.load import revealed_dict
from ...configs.schema import AnyServerConfig

log = logging.getLogger("pdserve.front")

# -P keeps the working directory out of sys.path: in a checkout it holds folders named like other people's packages.
LEADER_COMMAND = (sys.executable, "-P", "-m", "pdserve.scheduler.engine.leader")
SPIN_COUNTS = {"x86_64": "1000", "aarch64": "40000"}
"""How often idle OpenMP threads look for work before they sleep (GOMP_SPINCOUNT): for about 40 us, longer than the host
takes between two operations of a step. A look takes 0.85 ns on a Neoverse N1 and 45 ns (the instruction `pause`) on
recent Intel CPUs. Threads that spin for a millisecond are a tenth faster on an idle machine and several times slower on
a busy one: they use up their share of the cores before the thread that they wait for gets one."""
TERM_GRACE_S = 3.0
KILL_GRACE_S = 3.0


class LeaderProcess:
    """Owns the process and the write end of its stdin. Created on the event loop it reports to."""

    def __init__(
        self,
        config: AnyServerConfig,
        frontend_address: str,
        command: Sequence[str] = LEADER_COMMAND,
        env: Mapping[str, str] | None = None,
    ) -> None:
        # A process group of its own: Ctrl-C in a terminal reaches the front alone, which then drains the leader.
        spin_count = SPIN_COUNTS.get(platform.machine(), SPIN_COUNTS["x86_64"])
        environment = {"GOMP_SPINCOUNT": spin_count, **(os.environ if env is None else env)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0, env=environment)
        self._exited = asyncio.Event()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), name="leader-watch", daemon=True).start()
        introduction = json.dumps({"config": revealed_dict(config), "front": frontend_address})
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has exited already: the watcher reports that
            self._process.stdin.write(introduction.encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """As in subprocess: negative for the signal that ended it, None while it runs."""
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
        return f"process {self.pid} was ended by {name}"

    async def wait(self) -> int:
        """The exit status, once there is one."""
        await self._exited.wait()
        return self._process.returncode

    async def stop(self, patience_s: float) -> int | None:
        """End it: wait `patience_s` for it to go by itself, then SIGTERM, then SIGKILL.

        Returns None when even that was not enough: a process with much pinned memory can stay in the kernel for
        minutes after SIGKILL, and the front does not wait for it.
        """
        for deadline_s, ask in ((patience_s, None), (TERM_GRACE_S, signal.SIGTERM), (KILL_GRACE_S, signal.SIGKILL)):
            if ask is not None and not self._exited.is_set():
                log.warning("leader process %d has not ended; sending %s", self.pid, ask.name)
                self._signal(ask)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    return await self.wait()
        log.error("leader process %d is still in the kernel %.0f s after SIGKILL", self.pid, KILL_GRACE_S)
        return None

    def kill(self) -> None:
        """End it now, without waiting."""
        if not self._exited.is_set():
            self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Let go of its stdin, which ends a leader that still runs."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(self._exited.set)
