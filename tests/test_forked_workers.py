"""`--workers`: results and exit code are those of a run without workers; killed workers; groups of files."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFTEST = """
import os
import pytest

@pytest.fixture(scope="session", autouse=True)
def session(tmp_path_factory):
    print("in", os.getpid(), tmp_path_factory.getbasetemp().name)
    yield
    if os.environ.get("FAIL_AT_THE_END"):
        raise ValueError("at the end")
"""
MIXED = """
import os, signal, warnings
import pytest

@pytest.fixture(scope="module")
def number():
    yield 7
    print("module ends")

def test_passes(number, tmp_path):
    assert number == 7

def test_fails():
    print("output of the test")
    assert "left" == "right"

def test_kills_its_worker():
    os.kill(os.getpid(), signal.SIGKILL)

def test_runs_in_another_worker(number):
    warnings.warn("careful")

@pytest.mark.skip(reason="not today")
def test_skipped():
    pass
"""
NOTES_PID = """
import os, pathlib, time

def test_notes_pid():
    pathlib.Path(f"{pathlib.Path(__file__).stem}.pid").write_text(str(os.getpid()))
    deadline = time.monotonic() + 60
    while not pathlib.Path("test_other.pid").exists():  # so that this worker does not run that file
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""


def run(folder: Path, *options: str, timeout: float = 120, **environment: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "tests.forked_workers", "-p", "no:cacheprovider", "-ra", *options]
    variables = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    path = folder / "output.txt"
    with path.open("w") as output:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**variables, **environment},
            stdout=output,
            stderr=output,
            timeout=timeout,
            check=False,
        )
    return done.returncode, path.read_text()


def test_results_are_those_of_one_process_and_a_killed_worker_fails_one_test(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_mixed.py").write_text(MIXED)
    (tmp_path / "test_other.py").write_text("def test_passes(): pass")
    code, output = run(tmp_path, "--workers=2")
    assert code == 1
    assert "2 failed, 3 passed, 1 skipped, 1 warning" in output
    assert "output of the test" in output
    assert "assert 'left' == 'right'" in output
    assert "the worker that ran this test ended: signal SIGKILL" in output
    assert "careful" in output
    assert "not today" in output


def test_process_that_a_test_leaves_behind_does_not_delay_the_end(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("""
import os, pathlib, time

def test_forks():
    pid = os.fork()
    if pid == 0:
        time.sleep(100)
        os._exit(0)
    pathlib.Path("left_behind").write_text(str(pid))
""")
    try:
        code, output = run(tmp_path, "--workers=2", timeout=60)
    finally:
        os.kill(int((tmp_path / "left_behind").read_text()), signal.SIGKILL)
    assert code == 0, output


def test_fixtures_of_the_session_end_with_the_worker(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_a.py").write_text("def test_a(): pass")
    (tmp_path / "test_b.py").write_text("def test_b(): pass")
    code, output = run(tmp_path, "--workers=1", FAIL_AT_THE_END="1")
    assert (code, output.count("ValueError: at the end")) == (1, 2), output
    assert "2 passed, 1 error" in output
    assert "ERROR test_b.py::test_b" in output


def test_a_worker_runs_all_tests_of_a_group_of_files(tmp_path: Path) -> None:
    for name in (
        "tests/models/decoders/test_smollm2.py",
        "tests/models/formats/test_gguf_file.py",
        "tests/test_other.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(NOTES_PID)
    code, output = run(tmp_path, "--workers=3", "--import-mode=importlib")
    assert code == 0, output
    model, file, other = ((tmp_path / f"test_{name}.pid").read_text() for name in ("smollm2", "gguf_file", "other"))
    assert model == file != other


def test_first_failure_ends_the_run_if_asked_for(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("""
import pathlib, time

def test_fails():
    deadline = time.monotonic() + 60
    while not pathlib.Path("started").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert False
""")
    (tmp_path / "test_b.py").write_text("""
import pathlib, time, pytest

@pytest.fixture
def server():
    pathlib.Path("started").touch()
    yield
    pathlib.Path("stopped").touch()

def test_long(server):
    time.sleep(100)
""")
    code, output = run(tmp_path, "--workers=2", "-x")
    assert code == 1
    assert "stopping after 1 failures" in output
    assert (tmp_path / "stopped").exists(), "the fixture was not torn down"


@pytest.mark.parametrize("workers", ["0", "2"])
def test_errors_of_collection_are_reported(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_a.py").write_text("import nothing_of_this_name")
    code, output = run(tmp_path, f"--workers={workers}")
    assert code == 2
    assert "No module named 'nothing_of_this_name'" in output
