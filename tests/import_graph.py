"""Which files import which, read from the source: imports inside functions count, and so do modules that are named in a
string, as `python -m` and `monkeypatch.setattr` do.
"""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDERS = ("server", "scheduler", "models", "memory", "transfer", "kernels", "configs", "common")
"""The folders of the package `pdserve`."""
_WITH_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
_DOTTED = re.compile(r"\b(?:pdserve|tests|benchmarks)(?:\.\w+)+")
_FROM_IMPORT = re.compile(r"from ((?:pdserve|tests|benchmarks)(?:\.\w+)*) import (\([^)]*\)|.*)")
_LAUNCHER = re.compile(r'launcher\("([\w.]+)"')  # kernels/backends/dispatch.py imports modules of kernels/ on first use
_WORD = re.compile(r"\w+")


def imports(path: Path) -> tuple[tuple[int, str, int], ...]:
    """(level, dotted name, line) of every import statement, also those inside functions."""
    return _imports(path.read_text(encoding="utf-8"))


@functools.cache
def _imports(source: str) -> tuple[tuple[int, str, int], ...]:
    """Cached, because several tests look at every file, and parsing all of them takes a second."""
    return tuple(_each_import(source))


def _each_import(source: str) -> Iterator[tuple[int, str, int]]:
    for node in _statements(ast.parse(source).body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            if node.module is None:
                for alias in node.names:
                    yield node.level, alias.name, node.lineno
            else:
                yield node.level, node.module, node.lineno


def _statements(body: list[Any]) -> Iterator[ast.AST]:
    """These statements and all statements inside them. `ast.walk` would visit expressions too, which takes longer."""
    for node in body:
        yield node
        for field in vars(node).values():
            if type(field) is list:  # bodies, branches, handlers and cases
                yield from _statements([part for part in field if isinstance(part, _WITH_STATEMENTS)])


def imported_file(path: Path, level: int, name: str) -> Path:
    """The file that a relative import of `path` names; the folder, if it names one."""
    target = path.parents[level - 1].joinpath(*name.split("."))
    return target if target.is_dir() else target.with_suffix(".py")


def reached_from(changed: Iterable[Path], root: Path = ROOT) -> dict[Path, int]:
    """The changed files, and every Python file that imports one of them, directly or through others: over how many
    imports. A file that is no module of ours counts as imported by the files that contain its name.
    """
    importers: dict[Path, list[Path]] = {}
    modules = python_files(root)
    others = [path for path in changed if path not in modules]
    for path in modules:
        source = path.read_text(encoding="utf-8")
        for target in named_files(path, root):
            importers.setdefault(target, []).append(path)
        for other in others:
            if other.name in source:
                importers.setdefault(other, []).append(path)
    distance = dict.fromkeys(changed, 0)
    near = list(distance)
    for path in near:  # grows: nearest first
        for importer in importers.get(path, ()):
            if importer not in distance:
                distance[importer] = distance[path] + 1
                near.append(importer)
    return distance


def python_files(root: Path) -> list[Path]:
    """In this order, to be the same in every checkout."""
    return sorted(path for folder in (*FOLDERS, "tests", "benchmarks") for path in (root / folder).rglob("*.py"))


def named_files(path: Path, root: Path) -> frozenset[Path]:
    """Our files that `path` imports, or names in a string."""
    return _named_files(path, path.read_text(encoding="utf-8"), root)


@functools.cache
def _named_files(path: Path, source: str, root: Path) -> frozenset[Path]:
    """Cached, because a run of mutations asks for each of them."""
    found = {_file(root, name) for name in _DOTTED.findall(source)}
    for module, names in _FROM_IMPORT.findall(source):  # `from tests.kernels import places`: a name may be a module
        found |= {_file(root, f"{module}.{name}") for name in _WORD.findall(names)}
    found |= {_file(root, f"kernels.{name}") for name in _LAUNCHER.findall(source)}
    found |= {imported_file(path, level, name) for level, name, _ in _imports(source) if level > 0}
    return frozenset(file for file in found if file is not None and file.suffix)


def _file(root: Path, name: str) -> Path | None:
    """The file of a module, or of the module that has an attribute of this name."""
    parts = name.removeprefix("pdserve.").split(".")
    for end in range(len(parts), 0, -1):
        place = root.joinpath(*parts[:end])
        for file in (place.with_suffix(".py"), place / "__main__.py"):
            if file.is_file():
                return file
    return None
