"""Checks that a compose example has enough memory and disk: exits with one line for each that is missing."""

import argparse
import re
import shutil
import sys
from pathlib import Path

GIB = 1 << 30


def main() -> str | None:
    """What is missing; None if nothing is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-gib", type=float, required=True, help="memory that must be available")
    parser.add_argument("--disk-gib", type=float, required=True, help="disk space that must be free, for containers")
    options = parser.parse_args()
    found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, "every Linux since 3.14 has it"
    wanted = (
        ("memory", int(found[1]) * 1024, options.memory_gib),
        ("disk", shutil.disk_usage("/").free, options.disk_gib),
    )
    missing = [
        f"this example needs {least:g} GiB of {what}, and {free / GIB:.1f} GiB are free"
        for what, free, least in wanted
        if free < least * GIB
    ]
    return "\n".join(missing) or None


if __name__ == "__main__":
    sys.exit(main())
