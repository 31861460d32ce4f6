"""Garbage collector settings of a server process."""

import gc
import subprocess
import sys

from pdserve.common.gc_tuning import kept_for_now
from tests.cluster.servers import python_path

PROGRAM = """
import gc
import pdserve.server.launch.frontend
from pdserve.common.gc_tuning import keep_for_good

before = len(gc.get_objects())
keep_for_good()
print(before, len(gc.get_objects()))
"""


def test_keep_for_good_excludes_loaded_objects_from_collections() -> None:
    environ = {"PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before > 10_000
    assert after < before / 100


def test_kept_for_now_ends_with_its_block() -> None:
    prompts = [[index] for index in range(1000)]
    with kept_for_now():
        assert gc.get_freeze_count() > 1000
        assert not any(found is prompts for found in gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert any(found is prompts for found in gc.get_objects())
