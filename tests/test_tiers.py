"""`--tier` and `--minutes`: which test files run, in which order, and which are left out. They run in a repository of a
few small files, with copies of the plugins.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiers
from tests.import_graph import ROOT, reached_from

PLUGINS = ("forked_workers.py", "import_graph.py", "processes.py", "tiers.py")
PASSES = "def test_passes(): pass\n"
ENDS_THE_TIME = """
import time

def test_makes_it_an_hour_later():
    now = time.monotonic
    time.monotonic = lambda: now() + 3600

def test_of_a_file_that_has_begun():
    pass
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A change of scheduler/queue.py on a branch; `test_queue` reaches it directly, `test_pair` through the server."""
    write(
        tmp_path,
        {
            "scheduler/queue.py": "SIZE = 4",
            "scheduler/engine.py": "from .queue import SIZE",
            "server/command.py": 'PROGRAM = "pdserve.scheduler.engine"',
            "tests/scheduler/test_queue.py": f"import pdserve.scheduler.queue\n{PASSES}",
            "tests/cluster/test_engine.py": f"from pdserve.scheduler import engine\n{PASSES}",
            "tests/cluster/test_other.py": PASSES,
            "tests/cluster/test_pair.py": f"from tests.cluster.servers import start\n{PASSES}",
            "tests/cluster/servers.py": "def start():\n    from pdserve.server.command import PROGRAM",
            "tests/kernels/test_fixed.py": PASSES,
            ".gitignore": "build/\n__pycache__/\n",
        },
    )
    (tmp_path / ".dev" / "pdserve").mkdir(parents=True)
    for folder in ("scheduler", "server"):
        (tmp_path / ".dev" / "pdserve" / folder).symlink_to(tmp_path / folder)
    for name in PLUGINS:
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    commit(tmp_path, "first")
    git(tmp_path, "checkout", "--quiet", "-b", "topic")
    (tmp_path / "scheduler" / "queue.py").write_text("SIZE = 5")
    commit(tmp_path, "second")
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True)


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", message)


def run(folder: Path, *options: str) -> tuple[int, list[str], list[str]]:
    """Exit code, test files in the order in which they ran, and the lines about those that were left out."""
    plugins = ["-p", "tests.forked_workers", "-p", "tests.tiers", "-p", "no:cacheprovider"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "--workers=1",
        "--import-mode=importlib",
        *plugins,
        *options,
        "tests",
    ]
    environment = os.environ | {
        "PYTHONPATH": f"{folder}:{folder}/.dev",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    lines = done.stdout.splitlines()
    ran = [
        line.split("::")[0].removeprefix("tests/") for line in lines if line.endswith("PASSED") or " PASSED " in line
    ]
    return done.returncode, list(dict.fromkeys(ran)), [line for line in lines if line.startswith("tests/cluster: ")]


def test_fixed_files_run_and_then_those_that_reach_a_changed_file_nearest_first(repository: Path) -> None:
    fixed, mirrored, direct, through_server = (
        *("kernels/test_fixed.py", "scheduler/test_queue.py"),
        *("cluster/test_engine.py", "cluster/test_pair.py"),
    )
    assert run(repository, "--tier=test") == (
        0,
        [fixed, mirrored, direct, through_server],
        ["tests/cluster: other"],
    )
    assert run(repository, "--tier=rest") == (0, ["cluster/test_other.py"], [])


def test_rest_succeeds_if_nothing_was_left_out_and_fails_if_nothing_ran_before(repository: Path) -> None:
    code, _, _ = run(repository, "--tier=rest")
    assert code == pytest.ExitCode.USAGE_ERROR
    (repository / "tests" / "cluster" / "test_other.py").unlink()
    run(repository, "--tier=test")
    assert run(repository, "--tier=rest") == (0, [], [])


def test_no_file_begins_after_the_given_minutes(repository: Path) -> None:
    (repository / "tests" / "scheduler" / "test_queue.py").write_text(
        f"import pdserve.scheduler.queue\n{ENDS_THE_TIME}"
    )
    code, ran, left_out = run(repository, "--tier=test", "--minutes=30")
    assert (code, ran) == (0, ["kernels/test_fixed.py", "scheduler/test_queue.py"])
    assert left_out == ["tests/cluster: engine other pair"]
    assert run(repository, "--tier=rest")[1] == [f"cluster/test_{name}.py" for name in ("engine", "other", "pair")]


def test_a_failure_in_the_tier_is_the_exit_code(repository: Path) -> None:
    (repository / "tests" / "cluster" / "test_pair.py").write_text("def test_fails(): assert False")
    assert run(repository, "--tier=test")[0] == 1


def test_changes_are_counted_from_main_or_on_main_from_the_commit_before(repository: Path) -> None:
    queue = repository / "scheduler" / "queue.py"
    assert tiers.changed_files(repository) == [queue]
    (repository / "new.md").touch()
    assert tiers.changed_files(repository) == [queue, repository / "new.md"], "also what is not committed"
    git(repository, "checkout", "--quiet", "main")
    assert tiers.changed_files(repository) == [], "main has one commit"
    git(repository, "merge", "--quiet", "topic")
    assert tiers.changed_files(repository) == [queue, repository / "new.md"]


def test_nothing_is_changed_without_a_repository(tmp_path: Path) -> None:
    assert tiers.changed_files(tmp_path) == []


def test_importers_of_a_file_are_found_through_statements_strings_and_names(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "kernels/ops/sum.cu": "",
            "kernels/ops/sum.py": 'SOURCE = "sum.cu"',
            "kernels/__main__.py": "def main():\n    from .ops.sum import SOURCE",
            "tests/kernels/runs.py": 'COMMAND = ["-m", "pdserve.kernels"]',
            "tests/kernels/test_lists.py": "from tests.kernels import (\n    other,\n    runs,\n)",
            "tests/kernels/test_patches.py": 'patch("pdserve.kernels.ops.sum.SOURCE")',
            "kernels/dispatch.py": 'launcher("ops.sum", "launch_sum")',
            "tests/kernels/other.py": "",
        },
    )
    found = reached_from([tmp_path / "kernels" / "ops" / "sum.cu"], tmp_path)
    assert {path.relative_to(tmp_path).as_posix(): distance for path, distance in found.items()} == {
        "kernels/ops/sum.cu": 0,
        "kernels/ops/sum.py": 1,
        "kernels/__main__.py": 2,
        "kernels/dispatch.py": 2,
        "tests/kernels/test_patches.py": 2,
        "tests/kernels/runs.py": 3,
        "tests/kernels/test_lists.py": 4,
    }


def test_files_of_the_fixed_tiers_exist() -> None:
    assert [file for file in tiers.files_in((*tiers.CHECK, *tiers.FIXED)) if not file.is_file()] == []
    assert all(tiers.files_in([place]) for place in tiers.FIXED)
