"""Counts the product files that commits touch: what a format or a family costs (docs/adding_a_format.md).

python -m tests.files_of_commit COMMIT...
"""

import subprocess
import sys

from tests.import_graph import FOLDERS, ROOT

PRODUCT = tuple(f"{folder}/" for folder in FOLDERS)


def product_files(commit: str) -> list[str]:
    changed = ["git", "-C", str(ROOT), "diff-tree", "--no-commit-id", "--name-only", "-r", commit]
    names = subprocess.run(changed, check=True, capture_output=True, text=True).stdout.split()
    return [name for name in names if name.startswith(PRODUCT) and name.endswith((".py", ".cu", ".cuh"))]


if __name__ == "__main__":
    for commit in sys.argv[1:]:
        files = product_files(commit)
        print(f"{commit}: {len(files)} product files: {', '.join(files)}")
