"""The rooms of the house: which folder may import which, checked on the source."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "server": {"scheduler", "models", "memory", "transfer", "kernels", "configs"},
    "scheduler": {"models", "memory", "transfer", "kernels", "configs"},
    "models": {"memory", "kernels", "configs"},
    "memory": {"kernels", "configs"},
    "transfer": {"kernels", "configs"},
    "kernels": set(),
    "configs": set(),
}

DECIDING = (
    "ageing.py",
    "background_copies.py",
    "compute_queue.py",
    "deadlines.py",
    "decode.py",
    "dispatch_window.py",
    "effects.py",
    "fences.py",
    "hot_buffers.py",
    "intake.py",
    "lifecycle.py",
    "orders.py",
    "prefill.py",
    "prefill_limits.py",
    "prefill_peers.py",
    "prompt_queue.py",
    "queue_pace.py",
    "request.py",
    "request_line.py",
    "request_memory.py",
    "reservation.py",
    "retraction.py",
    "run_queue.py",
    "staged_arrivals.py",
    "staged_sends.py",
    "transfer.py",
    "transfer_line.py",
)
"""The modules of scheduler/ that decide: plain integers in, effects out."""

NOT_FOR_DECISIONS = {"asyncio", "mooncake", "socket", "subprocess", "threading", "time", "torch", "zmq"}

FRONT_MODULES = ("catalog.py", "config.py", "gguf_file.py")
"""The modules of models/ that the HTTP front imports: it must start without torch."""


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str, int]]:
    """(level, dotted name, line) of every import statement, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            if node.module is None:
                for alias in node.names:
                    yield node.level, alias.name, node.lineno
            else:
                yield node.level, node.module, node.lineno


def violations(folder: str, path: Path) -> list[str]:
    """What `path` imports against the table, or in another spelling than `from ..folder.module import name`."""
    found = []
    depth = len(path.relative_to(ROOT / folder).parts)
    for level, name, line in imports(path):
        where = f"{path.relative_to(ROOT)}:{line}"
        head = name.split(".")[0]
        if level == 0:
            if head == "pdserve" or (head in MAY_IMPORT and head != "kernels"):
                found.append(f"{where}: import {name}: between our folders, import relatively")
        elif level == depth + 1:
            if head != folder and head not in MAY_IMPORT[folder]:
                found.append(f"{where}: {folder}/ may not import {head}/")
        elif level > depth + 1:
            found.append(f"{where}: a relative import beyond the package")
    return found


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_down_only(folder: str) -> None:
    assert [problem for path in modules(folder) for problem in violations(folder, path)] == []


def test_the_check_itself_sees_violations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "configs" / "deep").mkdir(parents=True)
    upward = tmp_path / "configs" / "upward.py"
    upward.write_text("def f():\n    from ..server.cli import main\nfrom .schema import X\nimport json\n")
    absolute = tmp_path / "configs" / "absolute.py"
    absolute.write_text("import pdserve.server\nfrom transfer.layout import KvLayout\nfrom ... import far\n")
    deep = tmp_path / "configs" / "deep" / "module.py"
    deep.write_text("from ..schema import X\nfrom ...memory import pages\n")
    assert violations("configs", upward) == ["configs/upward.py:2: configs/ may not import server/"]
    assert [problem.split(": ")[0] for problem in violations("configs", absolute)] == [
        "configs/absolute.py:1",
        "configs/absolute.py:2",
        "configs/absolute.py:3",
    ]
    assert violations("configs", deep) == ["configs/deep/module.py:2: configs/ may not import memory/"]


@pytest.mark.parametrize("name", DECIDING)
def test_decisions_have_no_tensors_sockets_or_clock(name: str) -> None:
    imported = {dotted.split(".")[0] for level, dotted, _ in imports(ROOT / "scheduler" / name) if level == 0}
    assert imported & NOT_FOR_DECISIONS == set()


def test_nothing_that_decisions_import_brings_tensors_or_sockets() -> None:
    names = [f"pdserve.scheduler.{name.removesuffix('.py')}" for name in DECIDING]
    program = f"import sys, {', '.join(names)}; print(*({{'torch', 'zmq', 'mooncake'}} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".dev")}
    done = subprocess.run([sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize("name", FRONT_MODULES)
def test_what_the_front_imports_of_models_has_no_torch(name: str) -> None:
    imported = {dotted.split(".")[0] for level, dotted, _ in imports(ROOT / "models" / name) if level == 0}
    assert "torch" not in imported


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_top_level_folder_is_not_a_package_of_its_own(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()
    link = ROOT / ".dev" / "pdserve" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("../..") / folder
