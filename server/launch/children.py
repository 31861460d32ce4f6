"""Starts the processes of `pdserve up`, merges their logs, notices when one exits, and ends them in bounded time.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from ...configs.errors import PdserveError

_STYLES = ("cyan", "green", "magenta", "yellow")
LABEL_WIDTH = len("[prefill] ")
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
    """One running process and the thread that reads its output."""

    name: str
    process: subprocess.Popen[str]
    reader: threading.Thread = field(init=False)
    started_at: float = field(default_factory=time.monotonic)
    last_line: str = ""


class Children:
    """Starts, watches and ends a few processes. All calls come from one thread; `stop()` may be called twice."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._children: list[Child] = []
        self._lock = threading.Lock()
        self._held: list[Text] | None = None

    def start(self, name: str, command: Sequence[str], environ: Mapping[str, str]) -> Child:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        style = _STYLES[len(self._children) % len(_STYLES)]
        child = Child(name, process)
        child.reader = threading.Thread(target=self._relay, args=(child, style), name=f"{name}-log", daemon=True)
        child.reader.start()
        self._children.append(child)
        return child

    def check(self) -> None:
        """Raise ChildEndedError when a child has ended."""
        for child in self._children:
            code = child.process.poll()
            if code is None:
                continue
            child.reader.join(timeout=1.0)  # its last lines may still be in the pipe
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            words = f"; its last line: {child.last_line}" if child.last_line else ""
            age_s = time.monotonic() - child.started_at
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
            with suppress(ProcessLookupError):  # the child and all its descendants have ended
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
            child.reader.join(timeout=3.0)  # it ends when the last process that holds the pipe has ended

    def _relay(self, child: Child, style: str) -> None:
        assert child.process.stdout is not None
        with child.process.stdout as lines:
            for line in lines:
                text = line.rstrip("\r\n")
                child.last_line = text.strip() or child.last_line
                label = f"[{child.name}] ".ljust(LABEL_WIDTH)
                self._print(Text.assemble((label, style), without_role(text, child.name)))

    def _print(self, line: Text) -> None:
        with self._lock:
            if self._held is not None:
                self._held.append(line)
            else:
                self._console.print(line, soft_wrap=True)


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
