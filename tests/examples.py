"""How many random examples a test draws."""

import os

FULL = os.environ.get("PDSERVE_EXAMPLES") == "full"
"""`make test-examples`."""


def examples(full: int, short: int) -> int:
    """`short` in `make test-all`, which runs on every commit; `full` in `make test-examples`."""
    return full if FULL else short
