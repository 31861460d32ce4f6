"""What `make demo` and `make setup` install. A script replaces the interpreter of .venv and its pip."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
echo "python $*" >> calls
case "$*" in
    *'version("torch")'*) test -n "$INSTALLED" && echo "$INSTALLED" ;;
    *--dry-run*) echo "$OFFERED" ;;
esac
"""
UV = """#!/bin/sh
echo "uv $*" >> calls
exit $UV_STATUS
"""
WITH_CUDA = json.dumps({"install": [{"metadata": {"requires_dist": ["nvidia-cudnn-cu13==9"]}}]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("extra", "installed", "uv_status", "expected"),
    [
        ("cpu", "", "0", ["uv pip install", "pip install"]),
        ("cpu", "", "1", ["uv pip install", "pip install"]),  # torch's builds for the CPU cannot be reached
        ("cuda13", "2.13.0+cpu", "0", ["pip uninstall", "pip install"]),
    ],
)
def test_extra_cpu_gets_torch_without_cuda_and_the_others_with_it(
    folder: Path, extra: str, installed: str, uv_status: str, expected: list[str]
) -> None:
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name, text in (("python", PYTHON), ("uv", UV)):
        program = folder / ".venv" / "bin" / name
        program.write_text(text)
        program.chmod(0o755)
    (folder / ".venv" / ".stamp-python").touch()
    environment = os.environ | {"INSTALLED": installed, "OFFERED": WITH_CUDA, "UV_STATUS": uv_status}
    command = ["make", f".venv/.stamp-deps-{extra}", f"EXTRA={extra}"]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    calls = (folder / "calls").read_text()
    assert [call for call in ("uv pip install", "pip uninstall", "pip install") if call in calls] == expected
    assert calls.endswith(f"pip install --quiet --editable .[{extra}]\n")


def test_demo_installs_no_packages_of_tests_and_documentation(folder: Path) -> None:
    def commands(target: str) -> str:
        return subprocess.run(
            ["make", "--dry-run", target], cwd=folder, capture_output=True, text=True, check=True
        ).stdout

    assert ("--editable" in commands("demo"), "--group dev" in commands("demo")) == (True, False)
    assert ("--editable" in commands("setup"), "--group dev" in commands("setup")) == (True, True)


def test_target_names_the_package_that_its_program_needs(tmp_path: Path) -> None:
    for name in ("bash", "make", "sed", "nproc"):
        program = shutil.which(name)
        assert program is not None
        (tmp_path / name).symlink_to(program)
    command = ["make", "--no-print-directory", "--old-file=setup", "test-page"]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 2, "make says that the target failed"
    assert "on Debian: apt-get install chromium" in done.stderr
