"""`python -m pdserve.server` is the `pdserve` command.

Ctrl-C while modules are imported, which takes most of a second, ends it as later: without a traceback. SIGTERM ends it
at once, also as the first process of a container, for which the kernel ignores signals that have no handler.
"""

import os
import signal
import sys


def open_missing_descriptors() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed. Otherwise the next sockets get their numbers,
    and log lines are sent to clients.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, "w" if number else "r", closefd=False))


def main() -> int:
    """Run the command of `sys.argv` and return its exit code."""
    open_missing_descriptors()
    signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))  # a server replaces it when it starts
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
