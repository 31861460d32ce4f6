"""Which torch `make setup` installs. A script replaces the interpreter of .venv and its pip."""

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
WITHOUT = json.dumps({"install": [{"metadata": {"requires_dist": ["sympy"]}}]})


@pytest.mark.parametrize(
    ("extra", "installed", "offered", "pip_args", "expected"),
    [
        ("cpu", "", WITH_CUDA, "", "uv"),
        ("cpu", "", WITHOUT, "", None),
        ("cpu", "", WITH_CUDA, "--no-index", None),
        ("cpu", "2.13.0+cpu", WITH_CUDA, "", None),
        ("cuda13", "", WITH_CUDA, "", None),
        ("cuda13", "2.13.0+cpu", WITH_CUDA, "", "uninstall"),
        ("cuda13", "2.13.0", WITH_CUDA, "", None),
    ],
)
@pytest.mark.parametrize("uv_status", ["0", "1"], ids=["reached", "unreachable"])
def test_setup_installs_torch_without_cuda_for_the_cpu_extra(
    tmp_path: Path, extra: str, installed: str, offered: str, pip_args: str, expected: str | None, uv_status: str
) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, text in (("python", PYTHON), ("uv", UV)):
        program = tmp_path / ".venv" / "bin" / name
        program.write_text(text)
        program.chmod(0o755)
    (tmp_path / ".venv" / ".stamp-python").touch()
    environment = os.environ | {"INSTALLED": installed, "OFFERED": offered, "UV_STATUS": uv_status}
    command = ["make", f".venv/.stamp-deps-{extra}", f"EXTRA={extra}", f"PIP_ARGS={pip_args}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    with_uv = [call for call in calls if call.startswith("uv ")]
    assert ["--torch-backend cpu torch>=" in call for call in with_uv] == ([True] if expected == "uv" else [])
    assert any("pip uninstall --quiet --yes torch" in call for call in calls) == (expected == "uninstall")
    assert f"--editable .[{extra}]" in calls[-1], "then everything else, also when torch's builds were not reached"
    assert ("cannot be reached" in done.stderr) == (expected == "uv" and uv_status == "1")


@pytest.mark.parametrize(
    ("target", "installed", "package"),
    [
        ("test-page", [], "chromium"),
        ("test-prometheus", [], "prometheus"),
        ("test-prometheus", ["prometheus"], "prometheus"),
    ],
)
def test_target_names_the_package_that_its_program_needs(
    tmp_path: Path, target: str, installed: list[str], package: str
) -> None:
    for name in ("bash", "make", "sed", "nproc"):
        program = shutil.which(name)
        assert program is not None
        (tmp_path / name).symlink_to(program)
    for name in installed:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    command = ["make", "--no-print-directory", "--old-file=setup", target]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    message, error = done.stderr.splitlines()
    assert f"on Debian: apt-get install {package}" in message
    assert error.startswith("make: ***"), "make says that the target failed"
