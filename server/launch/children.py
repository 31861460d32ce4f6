"""Processes that `pdserve up` starts: their logs under one roof, their death noticed, their end bounded.

Each child has its own session, so Ctrl-C reaches only us and we end them in order; `end_with_parent` covers the case
that we are killed before we can.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from ...configs.errors import PdserveError

_STYLES = ("cyan", "green", "magenta", "yellow")
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class ChildEndedError(PdserveError):
    """A child ended although nobody asked it to; the message says which, how, and its last words.

    `exit_code` is what the command that started it should end with: 2 after a mistake in the settings, otherwise 1.
    """

    def __init__(self, message: str, child_code: int) -> None:
        super().__init__(message)
        self.exit_code = 2 if child_code == 2 else 1


class Child:
    """One running process and the thread that reads its output."""

    def __init__(self, name: str, process: subprocess.Popen[str], reader: threading.Thread) -> None:
        self.name = name
        self.process = process
        self.reader = reader
        self.started_at = time.monotonic()

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the child and everything it started; nothing when all of it has gone."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return


class Children:
    """Starts, watches and ends a few processes. Used from one thread; `stop()` is safe to call twice."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._children: list[Child] = []
        self._last_lines: dict[str, deque[str]] = {}
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
        self._last_lines[name] = deque(maxlen=20)
        reader = threading.Thread(target=self._relay, args=(name, style, process), name=f"{name}-log", daemon=True)
        child = Child(name, process, reader)
        self._children.append(child)
        reader.start()
        return child

    def check(self) -> None:
        """Raise ChildEndedError when a child has ended."""
        for child in self._children:
            code = child.process.poll()
            if code is None:
                continue
            child.reader.join(timeout=1.0)  # its last words may still be in the pipe
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            last = next((line for line in reversed(self._last_lines[child.name]) if line.strip()), None)
            words = f"; its last line: {last.strip()}" if last is not None else ""
            age_s = time.monotonic() - child.started_at
            raise ChildEndedError(f"{child.name} {how} after {age_s:.1f} s{words}", code)

    @contextmanager
    def logs_held(self) -> Iterator[None]:
        """Keep the children's lines back while something else owns the terminal, then print them."""
        with self._lock:
            self._held = []
        try:
            yield
        finally:
            with self._lock:
                held, self._held = self._held or [], None
                for line in held:
                    self._console.print(line, soft_wrap=True)

    def stop(self, grace_s: float, *, hurry: threading.Event | None = None) -> None:
        """End the children one by one, the last started first: it may need the earlier ones to finish its work.

        Each gets SIGTERM and `grace_s`; what is then left of it, or when `hurry` is set, SIGKILL.
        """
        while self._children:
            child = self._children.pop()
            # only the child itself: it ends its own processes in its own order
            child.process.terminate()
            deadline = time.monotonic() + grace_s
            while child.process.poll() is None and time.monotonic() < deadline:
                if hurry is not None and hurry.is_set():
                    break
                time.sleep(0.05)
            if child.process.poll() is None:
                self._say(Text(f"{child.name} did not stop in time: killing it", style="red"))
            child.signal_group(signal.SIGKILL)
            child.process.wait()
            child.reader.join(timeout=3.0)  # ends when the last process that holds the pipe has gone

    def _relay(self, name: str, style: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                text = line.rstrip("\r\n")
                self._last_lines[name].append(text)
                self._say(Text.assemble((f"[{name}]".ljust(10), style), without_role(text, name)))

    def _say(self, line: Text) -> None:
        with self._lock:
            if self._held is not None:
                self._held.append(line)
            else:
                self._console.print(line, soft_wrap=True)


def without_role(line: str, role: str) -> str:
    """A line of a server's log without its role, which stands before the line already."""
    return re.sub(rf"^(\S+ \S+ [A-Z]) {re.escape(role)}(?:: | (?=rank |node ))", r"\1 ", line)


def end_with_parent(parent_pid: int) -> None:
    """Ask the kernel for a SIGTERM when our parent's starting thread ends; leave at once if it already has (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(f"pdserve: error: the process that started this one ({parent_pid}) has gone")
