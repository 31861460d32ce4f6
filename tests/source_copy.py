"""A copy of the sources, for tools that change them."""

import shutil
import subprocess
from pathlib import Path

from tests.import_graph import ROOT

LIST = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")


def copy_sources(copy: Path) -> None:
    """Copies the files that git knows or would add."""
    listed = subprocess.run(LIST, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
