"""The garbage collector of a process that serves."""

import subprocess
import sys

from tests.cluster.servers import python_path

PROGRAM = """
import gc
import pdserve.server.front
from pdserve.configs.collector import keep_for_good

before = len(gc.get_objects())
keep_for_good()
print(before, len(gc.get_objects()))
"""


def test_collections_look_at_nothing_that_was_loaded_before() -> None:
    environ = {"PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before > 10_000
    assert after < before / 100
