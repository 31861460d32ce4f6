"""Compiles grammars in a process of its own: `python -m pdserve.models.grammar.check MODEL LOAD_FORMAT MAX_BYTES`.

A hostile grammar may take minutes and gigabytes. A compiler cannot be interrupted, but a process can be killed. It
aborts when grammars take MAX_BYTES of memory, and a grammar that takes long runs at the lowest priority. The process
writes one line of JSON when it is ready, and then one for each line that it reads, a grammar: null, or why it is
refused.
"""

import contextlib
import os
import queue
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn, cast

import msgspec

from ...configs.sampling import Grammar
from ...configs.setting_types import LoadFormat
from ..loading.catalog import locate_model
from .compiler import GrammarCompiler
from .dialects import GrammarError

FIRST_CPU_S = 0.05
"""CPU time that a grammar gets at normal priority. Nearly all grammars need less; at the lowest priority they would
wait for seconds on a machine whose cores are all busy.
"""


def main() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the frontend handles Ctrl-C
    compiler = GrammarCompiler.of(locate_model(sys.argv[1], cast("LoadFormat", sys.argv[2])), max_cached=1)
    _ = compiler.vocabulary
    limit_memory(int(sys.argv[3]))
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    _answer(None)
    while True:
        line = lines.get()
        thread = threading.Thread(target=_compile, args=(compiler, line))  # priorities are those of threads
        started = time.process_time()
        thread.start()
        while thread.is_alive() and time.process_time() < started + FIRST_CPU_S:
            thread.join(FIRST_CPU_S / 2)
        if thread.is_alive():
            lower_priority(thread)
        thread.join()


def lower_priority(thread: threading.Thread) -> None:
    """Gives a thread the lowest priority."""
    assert thread.native_id is not None
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.setpriority(os.PRIO_PROCESS, thread.native_id, 19)


def _compile(compiler: GrammarCompiler, line: bytes) -> None:
    problem = None
    try:
        compiler.compile(msgspec.json.decode(line, type=Grammar))
    except GrammarError as error:
        problem = str(error)
    except Exception as error:  # the compiler must not die of one grammar
        problem = f"cannot be compiled: {type(error).__name__}: {error}"
    _answer(problem)


def limit_memory(more_bytes: int) -> None:
    """From now on, this process cannot get more than so many further bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _read(lines: "queue.SimpleQueue[bytes]") -> NoReturn:
    """Exit at the end of the frontend, also while a grammar is compiled."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


def _answer(problem: str | None) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(problem and problem[:2000]) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
