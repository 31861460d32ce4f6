"""Messages between a frontend and its grammar compiler (check.py): lines of JSON, `Compile` on the compiler's stdin and
`Report` on its stdout.

The first report says that the vocabulary was read, and has no number; so have those that say, while grammars are
compiled, that the compiler is alive.
"""

import os
from pathlib import Path
from typing import Literal

import msgspec

from ...common.sampling import Grammar

ALIVE_S = 1.0
"""Time between two reports that this process is alive."""
HUNG_S = 5.0
"""A compilation that neither uses the CPU nor waits for it for so long is ended."""
MAX_WAIT_S = 60.0
"""Most time for a compilation. After it, the machine has no CPU time left for it."""
STOPPED, WAITING_FOR_THE_MACHINE = "Tt", "RD"
"""States of processes in /proc. A compilation sleeps only in the second ones: it waits for a CPU or a disk."""

Ended = Literal["time", "memory", "late", "died"]
"""How a compilation ended without an answer: beyond a limit, for want of CPU time, or otherwise."""


class Compile(msgspec.Struct, frozen=True):
    number: int
    grammar: Grammar


class Report(msgspec.Struct, frozen=True):
    """What became of a grammar; `problem` is why it is refused."""

    number: int | None = None
    problem: str | None = None
    ended: Ended | None = None


def state_and_cpu_s(process: int) -> tuple[str, float]:
    """The state of a process, a letter, and the CPU time that it has used. Raises OSError if it has ended."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
