"""Compiles grammars in processes of their own: `python -m pdserve.models.grammar.check MODEL LOAD_FORMAT MAX_BYTES
MAX_CPU_S`.

A hostile grammar may take minutes and gigabytes. A compiler cannot be interrupted, but a process can be killed. This
process reads the vocabulary and forks one for each grammar, which takes milliseconds. It has one thread, because a fork
copies no others. Each of its children may take MAX_BYTES of memory and MAX_CPU_S; after FIRST_CPU_S it has the lowest
priority.
"""

import ctypes
import gc
import os
import resource
import selectors
import signal
import sys
import time
from pathlib import Path
from typing import cast

import msgspec

from ...common.sampling import Grammar
from ...configs.setting_types import LoadFormat
from ..loading.catalog import locate_model
from .check_messages import (
    ALIVE_S,
    HUNG_S,
    MAX_WAIT_S,
    STOPPED,
    WAITING_FOR_THE_MACHINE,
    Compile,
    Ended,
    Report,
    state_and_cpu_s,
)
from .compiler import GrammarCompiler
from .dialects import GrammarError

FIRST_CPU_S = 0.05
"""CPU time that a grammar gets at normal priority. Nearly all grammars need less; at the lowest priority they would
wait for seconds on a machine whose cores are all busy.
"""
POLL_S = 0.025
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_MOST_CHARACTERS = 2000
_READ_BYTES = 1 << 20


class Compilation:
    """A child that compiles one grammar. Its answer comes through a pipe."""

    def __init__(self, number: int, process: int, pipe: int) -> None:
        self.number = number
        self.pipe = pipe
        self._process = process
        self._started = self._active_at = time.monotonic()
        self._cpu_s = 0.0
        self._ended: Ended | None = None

    def watch(self) -> None:
        """End it if it has stopped or hangs, and lower its priority when it has had FIRST_CPU_S."""
        try:
            state, cpu_s = state_and_cpu_s(self._process)
        except OSError:
            return
        now = time.monotonic()
        if cpu_s > self._cpu_s or state in WAITING_FOR_THE_MACHINE:
            self._active_at = now
        if cpu_s > FIRST_CPU_S >= self._cpu_s:
            os.setpriority(os.PRIO_PROCESS, self._process, 19)
        self._cpu_s = cpu_s
        if state in STOPPED or now > self._active_at + HUNG_S:
            self.kill("died")
        elif now > self._started + MAX_WAIT_S:
            self.kill("late")

    def kill(self, ended: Ended) -> None:
        self._ended = ended
        os.kill(self._process, signal.SIGKILL)

    def report(self) -> Report:
        """Read the answer. Call this when the child has closed its end of the pipe."""
        answer = os.read(self.pipe, 1 << 16)
        os.close(self.pipe)
        _, status = os.waitpid(self._process, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            return Report(self.number, msgspec.json.decode(answer, type=str | None))
        by_signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        limits: dict[int | None, Ended] = {signal.SIGPROF: "time", signal.SIGABRT: "memory"}
        return Report(self.number, ended=self._ended or limits.get(by_signal, "died"))


class Compilations:
    """Forks a child for each line of stdin."""

    def __init__(self, compiler: GrammarCompiler, max_bytes: int, max_cpu_s: float) -> None:
        self._compiler = compiler
        self._max_bytes = max_bytes
        self._max_cpu_s = max_cpu_s
        self._libc = ctypes.CDLL(None)
        self._input = bytearray()
        self._open: dict[int, Compilation] = {}
        """By pipe."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)

    def serve(self) -> None:
        """Runs until stdin ends, which is when the frontend ends."""
        said_at = time.monotonic()
        while True:
            for key, _ in self._selector.select(POLL_S if self._open else None):
                if key.fd:
                    self._selector.unregister(key.fd)
                    say(self._open.pop(key.fd).report())
                elif not self._read():
                    return
            for compilation in self._open.values():
                compilation.watch()
            if self._open and time.monotonic() > said_at + ALIVE_S:
                said_at = time.monotonic()
                say(Report())

    def _read(self) -> bool:
        """Start what has arrived. Returns whether stdin is open."""
        data = os.read(0, _READ_BYTES)
        self._input += data
        if b"\n" in data:
            *lines, self._input[:] = self._input.split(b"\n")
            for line in lines:
                self._start(msgspec.json.decode(line, type=Compile))
        return bool(data)

    def _start(self, compile_: Compile) -> None:
        parent = os.getpid()
        reading, writing = os.pipe()
        process = os.fork()
        if process:
            os.close(writing)
            self._open[reading] = Compilation(compile_.number, process, reading)
            self._selector.register(reading, selectors.EVENT_READ)
            return
        try:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == parent:
                signal.setitimer(signal.ITIMER_PROF, self._max_cpu_s)
                limit_memory(self._max_bytes)
                problem = _compile(self._compiler, compile_.grammar)
                os.write(writing, msgspec.json.encode(problem and problem[:_MOST_CHARACTERS]))
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the frontend handles Ctrl-C
    compiler = GrammarCompiler.of(locate_model(sys.argv[1], cast("LoadFormat", sys.argv[2])), max_cached=1)
    _ = compiler.vocabulary
    gc.collect()
    gc.freeze()  # a collection in a child would copy all memory
    say(Report())
    Compilations(compiler, int(sys.argv[3]), float(sys.argv[4])).serve()
    os._exit(0)  # the children end with this process


def say(report: Report) -> None:
    os.write(1, msgspec.json.encode(report) + b"\n")


def _compile(compiler: GrammarCompiler, grammar: Grammar) -> str | None:
    try:
        compiler.compile(grammar)
    except GrammarError as error:
        return str(error)
    except Exception as error:  # it is the grammar's fault
        return f"cannot be compiled: {type(error).__name__}: {error}"
    return None


def limit_memory(more_bytes: int) -> None:
    """From now on, this process cannot get more than so many further bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main()
