"""Compiles grammars before requests are submitted, and refuses those that are invalid or take too long to compile."""

import asyncio
import logging
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from ...configs.errors import OverloadedError, ServerError
from ...configs.sampling import Grammar
from ...configs.setting_types import LoadFormat

log = logging.getLogger(__name__)

MAX_COMPILE_S = 3.0
"""Of CPU time. A grammar is never refused because other processes use the CPU."""
MAX_WAIT_S = 60.0
"""Most time for a compilation. After it, the machine has no CPU time left for the compiler, or the compiler hangs."""
MAX_COMPILE_BYTES = 1 << 30
START_S = 120.0
"""Most time that the process may take to start, in which it reads the vocabulary."""
MAX_REMEMBERED = 1024
MAX_REMEMBERED_CHARACTERS = 32 << 20
"""Most characters of all remembered grammars. Refused grammars are remembered too, however long they are."""
MAX_WAITING = 64
"""Most grammars in compilation or waiting for it: one is compiled at a time. Further ones are refused with 429."""
TIMEOUT_REMEMBERED_S = 60.0
"""A grammar that took too long is refused for this time, then compiled again: the machine may have been overloaded."""


CPU_INTERVAL_S = 0.1
"""How often the CPU time of a compilation is read."""


class _NoTimeLeftError(Exception):
    """The time has passed, but not the CPU time."""


class GrammarChecker:
    """Compiles grammars in a child process (models/grammar/check.py), because a compilation cannot be interrupted.

    The first grammar starts the child. If a grammar takes longer than `max_compile_s`, the child is killed; if it takes
    more than `max_bytes`, the child aborts. The next grammar starts another one. The child exits when this process
    does.
    """

    def __init__(
        self,
        model: str,
        load_format: LoadFormat,
        max_compile_s: float = MAX_COMPILE_S,
        max_bytes: int = MAX_COMPILE_BYTES,
    ) -> None:
        module = "pdserve.models.grammar.check"
        self._command = [sys.executable, "-P", "-m", module, model, load_format, str(max_bytes)]
        self._max_compile_s = max_compile_s
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[Grammar, asyncio.Future[str | None]] = {}
        """Grammars in compilation or waiting for it, with the result."""
        self._known: OrderedDict[Grammar, tuple[str | None, float]] = OrderedDict()
        """Why a grammar is refused (None: it is accepted), and until when this result is valid."""
        self._known_characters = 0

    async def check(self, grammar: Grammar) -> str | None:
        """Returns why this grammar is refused, or None if it is accepted. Results are cached, and calls that wait for
        equal grammars share one compilation.

        Raises OverloadedError if too many grammars wait, and ServerError if the compiler fails.
        """
        problem, until = self._known.get(grammar, (None, -math.inf))
        if time.monotonic() < until:
            self._known.move_to_end(grammar)
            return problem
        checking = self._waiting.get(grammar)
        if checking is None:
            if len(self._waiting) >= MAX_WAITING:
                raise OverloadedError(
                    f"{len(self._waiting)} grammars wait to be compiled (limit {MAX_WAITING}); try again later"
                )
            checking = self._waiting[grammar] = asyncio.ensure_future(self._compile_and_remember(grammar))
            checking.add_done_callback(lambda _: self._waiting.pop(grammar))
        return await asyncio.shield(checking)  # other calls may wait for the same grammar

    def close(self) -> None:
        """Kill the child. That ends a compilation that runs: Python would wait for its thread before it exits."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if (process := self._process) is not None:
            process.kill()

    async def _compile_and_remember(self, grammar: Grammar) -> str | None:
        problem: str | None
        try:
            problem = await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, grammar)
            self._remember(grammar, problem, math.inf)
        except TimeoutError:
            problem = f"takes longer than {self._max_compile_s:g} s to compile, the limit"
            self._remember(grammar, problem, time.monotonic() + TIMEOUT_REMEMBERED_S)
        except MemoryError:
            problem = f"takes more than {self._max_bytes >> 20} MiB of memory to compile, the limit"
            self._remember(grammar, problem, math.inf)
        return problem

    def _remember(self, grammar: Grammar, problem: str | None, until: float) -> None:
        if self._known.pop(grammar, None) is None:
            self._known_characters += len(grammar.text)
        self._known[grammar] = problem, until
        while len(self._known) > MAX_REMEMBERED or self._known_characters > MAX_REMEMBERED_CHARACTERS:
            oldest, _ = self._known.popitem(last=False)
            self._known_characters -= len(oldest.text)

    def _compile(self, grammar: Grammar) -> str | None:
        """Compiles the grammar in the child, on the thread. Returns why it is refused, or None. Raises TimeoutError,
        MemoryError or ServerError.
        """
        try:
            process = self._process or self._start()
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(grammar) + b"\n")
            process.stdin.flush()
            return self._answer(process, MAX_WAIT_S, self._max_compile_s)
        except _NoTimeLeftError:
            self._kill()
            raise OverloadedError(
                f"the grammar compiler got too little CPU time to answer within {MAX_WAIT_S:g} s; try again later"
            ) from None
        except (TimeoutError, MemoryError):
            self._kill()
            raise
        except OSError as error:
            self._kill()
            raise ServerError(f"the grammar compiler has failed: {error}") from error

    def _start(self) -> "subprocess.Popen[bytes]":
        started = time.monotonic()
        self._process = process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self._answer(process, START_S, START_S)
        except (_NoTimeLeftError, TimeoutError):
            self._kill()
            raise ServerError(f"the grammar compiler has not started within {START_S:g} s") from None
        log.info("grammar compiler started in %.1f s", time.monotonic() - started)
        return process

    def _answer(self, process: "subprocess.Popen[bytes]", timeout_s: float, cpu_s: float) -> str | None:
        """Reads and decodes the next line of the child, which may take so much time and CPU time. Raises
        _NoTimeLeftError, TimeoutError, MemoryError if the child has aborted, or OSError if it has exited.
        """
        assert process.stdout is not None
        output, line, ends_at = process.stdout.fileno(), b"", time.monotonic() + timeout_s
        cpu_ends_at = _cpu_s(process.pid) + cpu_s
        arrival = select.poll()  # select() is limited to descriptors below 1024, and each client has one
        arrival.register(output, select.POLLIN)
        while not line.endswith(b"\n"):
            while not arrival.poll(1000 * CPU_INTERVAL_S):
                if _cpu_s(process.pid) > cpu_ends_at:
                    raise TimeoutError
                if time.monotonic() > ends_at:
                    raise _NoTimeLeftError
            part = os.read(output, 1 << 16)
            if not part:
                status = process.wait()
                if status == -signal.SIGABRT:
                    raise MemoryError
                raise OSError(f"the compiler has exited with status {status}")
            line += part
        return msgspec.json.decode(line, type=str | None)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _cpu_s(pid: int) -> float:
    """The CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
