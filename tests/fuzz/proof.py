"""Proves the search for worst cases: with each fix taken out, it finds a case over the limit within PROOF_S.

`python -m tests.fuzz.proof [KIND ...]`. `patches/KIND.patch` takes the fix out of a copy of the sources.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.source_copy import copy_sources

PATCHES = Path(__file__).parent / "patches"
PROOF_S = 600


def main() -> int:
    kinds = sys.argv[1:] or sorted(path.stem for path in PATCHES.glob("*.patch"))
    return max([prove(kind) for kind in kinds])


def prove(kind: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_sources(copy)
        shutil.rmtree(copy / "tests/fuzz/corpus/worst", ignore_errors=True)  # the search has to find a case itself
        subprocess.run(["git", "apply", PATCHES / f"{kind}.patch"], cwd=copy, check=True)
        test = f"tests/fuzz/test_worst_cases.py::test_no_input_costs_more_than_its_limit[{kind}]"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
        environment = {**os.environ, "PYTHONPATH": f"{copy / '.dev'}:{copy}", "PDSERVE_FUZZ_MINUTES": "300"}
        began_s = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=PROOF_S, check=False
            )
        except subprocess.TimeoutExpired:
            print(f"{kind}: found nothing within {PROOF_S} s")
            return 1
        found = next((line for line in done.stdout.splitlines() if "AssertionError" in line and "costs" in line), None)
        print(f"{kind}: after {time.monotonic() - began_s:.0f} s: {found or done.stdout[-2000:]}", flush=True)
        return int(found is None)


if __name__ == "__main__":
    sys.exit(main())
