"""`python -m pdserve.server` is the `pdserve` command.

Ctrl-C while modules are imported, which takes most of a second, ends it as later: without a traceback.
"""

import sys


def main() -> int:
    """Run the command of `sys.argv` and return its exit code."""
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
