"""Replaces the part of a page between two marks by what the code says."""

import sys
from pathlib import Path


def update_section(page: Path, begin: str, end: str, content: str) -> int:
    """Write `content` between the marks; with --check on the command line, only compare. Returns an exit code."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    wanted = f"{before}{begin}\n{content}\n{end}{after}"
    if wanted == text:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{page.name}: the table is not what the code says; run: make format", file=sys.stderr)
        return 1
    page.write_text(wanted, encoding="utf-8")
    return 0
