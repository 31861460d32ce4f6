"""Test files that need a library that is not installed are skipped, and say which."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def collect(files: list[str], missing: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Collect test files where these modules cannot be imported."""
    for name in missing:
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"raise ModuleNotFoundError(name={name!r})\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-rs", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), ".dev", "."])}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_files_are_skipped_with_the_library_that_they_miss(tmp_path: Path) -> None:
    files = ["api/test_openai_client.py", "observability/test_tracing.py", "observability/test_request_log.py"]
    collected = collect([f"tests/server/{file}" for file in files], ["openai", "opentelemetry.sdk"], tmp_path)
    assert collected.returncode == 0, collected.stdout
    assert "test_openai_client.py needs openai: it is not installed" in collected.stdout
    assert "test_tracing.py needs opentelemetry.sdk: it is not installed" in collected.stdout
    assert "test_request_log.py::" in collected.stdout


def test_collection_fails_without_a_module_that_is_not_optional(tmp_path: Path) -> None:
    (tmp_path / "test_product.py").write_text("import pdserve.server.nothing\n")
    collected = collect(["-p", "tests.optional_libraries", str(tmp_path)], [], tmp_path)
    assert collected.returncode == 2, collected.stdout
    assert "No module named 'pdserve.server.nothing'" in collected.stdout
