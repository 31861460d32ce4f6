"""Runs Python programs that compile Triton kernels, in a fork of a process that has imported torch."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.servers import fork_server


def main(arguments: Sequence[str]) -> int:
    """In the fork. Triton is not imported yet, and TRITON_INTERPRET is not set."""
    (program,) = arguments
    exec(program, {"__name__": "__main__"})
    return 0


def run_program(program: str) -> tuple[int, str]:
    """The exit code of a program, and what it wrote to stderr."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryFile("w+") as stderr, Path(os.devnull).open() as null:
        process = fork_server().run(f"{__name__}:main", [program], environment, (null, stderr, stderr))
        code = process.wait(timeout=300)
        stderr.seek(0)
        return code, stderr.read()
