"""Starts the processes of `pdserve up`, merges their logs, restarts those that exit, and ends them in bounded time.

Each child has its own session. So Ctrl-C reaches only the parent, which then ends the children in order. If the parent
is killed before it can do so, the kernel ends them (`end_with_parent`).
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO

from rich.console import Console
from rich.text import Text

from ...common.errors import PdserveError

_STYLES = ("cyan", "green", "magenta", "yellow")
LABEL_WIDTH = len("[prefill] ")
RESTART_WINDOW_S = 60.0
MOST_RESTARTS = 5
"""Of one child within RESTART_WINDOW_S."""
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class ChildEndedError(PdserveError):
    """A child ended unexpectedly; the message has its name, its exit status and its last log line.

    `exit_code` is the code with which the parent exits: 2 after a mistake in the settings, otherwise 1.
    """

    def __init__(self, message: str, child_code: int) -> None:
        super().__init__(message)
        self.exit_code = 2 if child_code == 2 else 1


@dataclass
class Child:
    """One process and the thread that reads its output. Both are replaced when the child is started again."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    style: str
    process: subprocess.Popen[str] = field(init=False)
    reader: threading.Thread = field(init=False)
    started_at: float = field(init=False)
    last_line: str = field(init=False)
    restarts: list[float] = field(default_factory=list)
    """When it ended, of the restarts within RESTART_WINDOW_S."""
    restart_at: float | None = None
    """When it is started again; None while it runs."""


class Children:
    """Starts, watches and ends a few processes. All calls come from one thread; `stop()` may be called twice."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._children: list[Child] = []
        self._lock = threading.Lock()
        self._held: list[Text] | None = None

    def start(self, name: str, command: Sequence[str], environ: Mapping[str, str]) -> Child:
        child = Child(name, command, environ, _STYLES[len(self._children) % len(_STYLES)])
        self._run(child)
        self._children.append(child)
        return child

    def check(self) -> None:
        """Raise ChildEndedError when a child has ended."""
        for child in self._children:
            self._check(child)

    def restart_ended(self) -> None:
        """Start children again that have ended: at once, and with growing pauses if that happens often. To be called
        again and again.

        Raises ChildEndedError for a child whose settings are wrong, and for one that ends too often.
        """
        for child in self._children:
            now = self._clock()
            if child.restart_at is not None:
                if now >= child.restart_at:
                    child.restart_at = None
                    self._run(child)
                continue
            try:
                self._check(child)
            except ChildEndedError as error:
                child.restarts = [ended_at for ended_at in child.restarts if ended_at > now - RESTART_WINDOW_S]
                often = len(child.restarts)
                if error.exit_code == 2:
                    raise
                if often == MOST_RESTARTS:
                    raise ChildEndedError(f"{error}; it was started {often} times within a minute", 1) from None
                _kill_group(child)  # its descendants must not hold memory and ports that the next process needs
                pause_s = 2.0 ** (often - 1) if often else 0.0
                child.restarts.append(now)
                child.restart_at = now + pause_s
                self._print(Text(f"{error}; starting it again{f' in {pause_s:g} s' if pause_s else ''}", style="red"))

    def _run(self, child: Child) -> None:
        child.process = subprocess.Popen(
            child.command,
            env=child.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        child.started_at, child.last_line = self._clock(), ""
        child.reader = threading.Thread(
            target=self._relay, args=(child, child.process.stdout), name=f"{child.name}-log", daemon=True
        )
        child.reader.start()

    def _check(self, child: Child) -> None:
        code = child.process.poll()
        if code is None:
            return
        child.reader.join(timeout=1.0)  # its last lines may still be in the pipe
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = f"; its last line: {child.last_line}" if child.last_line else ""
        age_s = self._clock() - child.started_at
        raise ChildEndedError(f"{child.name} {how} after {age_s:.1f} s{words}", code)

    @contextmanager
    def logs_held(self) -> Iterator[None]:
        """Hold back the children's log lines while the block uses the terminal, then print them."""
        with self._lock:
            self._held = []
        try:
            yield
        finally:
            with self._lock:
                held, self._held = self._held or [], None
                for line in held:
                    self._console.print(line, soft_wrap=True)

    def stop(
        self, grace_s: float, *, number: signal.Signals = signal.SIGTERM, hurry: threading.Event | None = None
    ) -> None:
        """End the children one by one. The last started ends first, because it may need the others to finish its work.

        Each gets the signal `number`; after `grace_s`, or when `hurry` is set, its process group gets SIGKILL.
        """
        while self._children:
            child = self._children.pop()
            # only the child gets the signal: it ends its own descendants in order
            child.process.send_signal(number)
            deadline = time.monotonic() + grace_s
            while child.process.poll() is None and time.monotonic() < deadline:
                if hurry is not None and hurry.is_set():
                    break
                time.sleep(0.05)
            if child.process.poll() is None:
                self._print(Text(f"{child.name} did not stop in time: killing it", style="red"))
            if child.restart_at is None:  # otherwise that was done when it ended
                _kill_group(child)
            child.process.wait()
            child.reader.join(timeout=3.0)  # it ends when the last process that holds the pipe has ended

    def _relay(self, child: Child, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                text = line.rstrip("\r\n")
                child.last_line = text.strip() or child.last_line
                label = f"[{child.name}] ".ljust(LABEL_WIDTH)
                self._print(Text.assemble((label, child.style), without_role(text, child.name)))

    def _print(self, line: Text) -> None:
        with self._lock:
            if self._held is not None:
                self._held.append(line)
            else:
                self._console.print(line, soft_wrap=True)


def _kill_group(child: Child) -> None:
    with suppress(ProcessLookupError):  # the child and all its descendants have ended
        os.killpg(child.process.pid, signal.SIGKILL)


def without_role(line: str, role: str) -> str:
    """Removes the role from a log line of a server: the label before the line shows it already."""
    return re.sub(rf"^(\S+ \S+ [A-Z]) {re.escape(role)}(?:: | (?=rank |node ))", r"\1 ", line)


def end_with_parent(parent_pid: int) -> None:
    """Ask the kernel (Linux) to send SIGTERM to this process when the thread that started it ends. Exit at once if the
    parent has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(f"pdserve: error: the process that started this one ({parent_pid}) has exited")
