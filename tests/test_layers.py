"""The layers of the code, checked on the source: which folder may import which, and which folders are pure.

Everything is checked by folder, so a new file is covered without being listed.
"""

import ast
import graphlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.import_graph import ROOT, imported_file, imports

MAY_IMPORT = {
    "server": {"scheduler", "models", "memory", "transfer", "kernels", "configs", "common"},
    "scheduler": {"models", "memory", "transfer", "kernels", "configs", "common"},
    "models": {"memory", "kernels", "configs", "common"},
    "memory": {"kernels", "configs", "common"},
    "transfer": {"kernels", "configs", "common"},
    "kernels": {"configs", "common"},
    "configs": {"common"},
    "common": set(),
}

LAYERS = {
    "server": [
        "",
        "plan",
        "plan/ratio",
        "bench",
        "terminal",
        "doctor",
        "launch",
        "connections",
        "api",
        "api/responses",
        "api/anthropic",
        "api/openai",
        "api/generate",
        "api/service",
        "api/common",
        "engine",
        "observability",
        "text",
        "text/parsers",
    ],
    "scheduler": [
        "engine",
        "ranks",
        "ranks/transfers",
        "simulation",
        "prefill",
        "decode",
        "decode/rooms",
        "decode/placement",
        "decode/memory",
        "decode/requests",
        "store",
        "chunking",
        "messages",
        "",
    ],
    "models": [
        "",
        "grammar",
        "graphs",
        "loading",
        "registry.py",
        "families",
        "decoders",
        "sampling",
        "layers",
        "config",
        "weights",
        "formats",
    ],
    "memory": ["hisparse", ""],
    "transfer": ["control", "store", "data", "mooncake", "plan", "protocol", ""],
    "kernels": [
        "nvfp4",
        "mla",
        "dsa",
        "moe",
        "moe/router",
        "hisparse",
        "staging",
        "sampling",
        "collectives",
        "head_linear",
        "numba",
        "layer_stack",
        "attention",
        "linear",
        "packed4",
        "gguf",
        "backends",
    ],
    "configs": [""],
    "common": ["", "machine"],
}
"""The subfolders of each folder, from top to bottom: a file imports from its own subfolder and from those below it. ""
is the folder itself, whose files may have places of their own.
"""
MOST_FILES = 15

PURE = (
    "scheduler/messages",
    "scheduler/chunking",
    "scheduler/decode",
    "scheduler/prefill",
    "scheduler/simulation",
    "scheduler/store",
    "transfer/plan",
)
"""Folders, with all their subfolders, that decide or describe: plain values in, plain values out."""
IMPURE = {"asyncio", "mooncake", "socket", "subprocess", "threading", "time", "torch", "zmq"}


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def layer_of(folder: str, path: Path) -> str:
    """The subfolder of a file, or of a folder, as `LAYERS` has it; the file itself if that lists it."""
    if (own := path.relative_to(ROOT / folder).as_posix()) in LAYERS[folder]:
        return own
    place = path.parent if path.suffix else path
    return "" if place == ROOT / folder else place.relative_to(ROOT / folder).as_posix()


def violations(folder: str, path: Path) -> list[str]:
    """What `path` imports against the tables, or in another spelling than `from ..folder.module import name`."""
    found = []
    depth = len(path.relative_to(ROOT / folder).parts)
    order = LAYERS[folder]
    own = layer_of(folder, path)
    if own not in order:
        return [f"{path.relative_to(ROOT)}: LAYERS does not list {own!r} of {folder}/"]
    for level, name, line in imports(path):
        where = f"{path.relative_to(ROOT)}:{line}"
        head = name.split(".")[0]
        if level == 0:
            if head == "pdserve" or (head in MAY_IMPORT and head not in ("kernels", "mooncake")):
                found.append(f"{where}: import {name}: between our folders, import relatively")
        elif level == depth + 1:
            if head == folder:
                found.append(f"{where}: inside {folder}/, import without its name")
            elif head not in MAY_IMPORT[folder]:
                found.append(f"{where}: {folder}/ may not import {head}/")
        elif level > depth + 1:
            found.append(f"{where}: a relative import beyond the package")
        else:
            below = layer_of(folder, imported_file(path, level, name))
            if order.index(below) < order.index(own):
                found.append(f"{where}: {folder}/{own} may not import {folder}/{below}")
    return found


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_down_only(folder: str) -> None:
    assert [problem for path in modules(folder) for problem in violations(folder, path)] == []


def test_the_check_itself_sees_violations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(LAYERS, "configs", ["", "deep"])
    (tmp_path / "configs" / "deep").mkdir(parents=True)
    (tmp_path / "configs" / "unknown").mkdir()
    upward = tmp_path / "configs" / "upward.py"
    upward.write_text("def f():\n    from ..server.cli import main\nfrom .schema import X\nimport json\n")
    absolute = tmp_path / "configs" / "absolute.py"
    absolute.write_text("import pdserve.server\nfrom transfer.layout import KvLayout\nfrom ... import far\n")
    deep = tmp_path / "configs" / "deep" / "module.py"
    deep.write_text(
        "from ..schema import X\nfrom ...memory import pages\nfrom .other import Y\nfrom ...configs.schema import X\n"
    )
    unknown = tmp_path / "configs" / "unknown" / "module.py"
    unknown.write_text("")
    assert violations("configs", upward) == ["configs/upward.py:2: configs/ may not import server/"]
    assert [problem.split(": ")[0] for problem in violations("configs", absolute)] == [
        "configs/absolute.py:1",
        "configs/absolute.py:2",
        "configs/absolute.py:3",
    ]
    assert violations("configs", deep) == [
        "configs/deep/module.py:1: configs/deep may not import configs/",
        "configs/deep/module.py:2: configs/ may not import memory/",
        "configs/deep/module.py:4: inside configs/, import without its name",
    ]
    assert violations("configs", unknown) == ["configs/unknown/module.py: LAYERS does not list 'unknown' of configs/"]


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_every_subfolder_is_described(folder: str) -> None:
    rows = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()
    described = "".join(row for row in rows if row.startswith(f"| `{folder}/` |"))
    named = [layer if layer.endswith(".py") else f"{layer}/" for layer in LAYERS[folder] if layer]
    assert [layer for layer in named if f"`{layer}`" not in described] == []


def test_imports_have_no_cycles() -> None:
    """Finds cycles of any length, including imports inside functions."""
    graph: dict[Path, set[Path]] = {}
    for path in (path for folder in MAY_IMPORT for path in modules(folder)):
        targets = (imported_file(path, level, name) for level, name, _ in imports(path) if level > 0)
        graph[path] = {target for target in targets if target.suffix}
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(str(path.relative_to(ROOT)) for path in error.args[1]))


def test_names_of_test_files_are_unique() -> None:
    """pytest imports test files by their bare names: it refuses the second file of a name."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_no_folder_is_crowded(folder: str) -> None:
    files = Counter(path.parent for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert {str(place.relative_to(ROOT)): count for place, count in files.items() if count > MOST_FILES} == {}


@pytest.mark.parametrize("folder", PURE)
def test_pure_folders_have_no_tensors_sockets_or_clock(folder: str) -> None:
    imported = {
        f"{path.relative_to(ROOT)}: {dotted}"
        for path in modules(folder)
        for level, dotted, _ in imports(path)
        if level == 0 and dotted.split(".")[0] in IMPURE
    }
    assert imported == set()


def test_importing_pure_folders_loads_no_torch_zmq_or_mooncake() -> None:
    paths = [path for folder in PURE for path in modules(folder)]
    names = ["pdserve." + ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    program = f"import sys, {', '.join(names)}; print(*({{'torch', 'zmq', 'mooncake'}} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".dev")}
    done = subprocess.run([sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_frontend_starts_without_torch() -> None:
    program = "import sys, pdserve.server.cli, pdserve.server.launch.frontend; print(*({'torch'} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".dev")}
    done = subprocess.run([sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_top_level_folder_is_not_a_package_of_its_own(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()
    link = ROOT / ".dev" / "pdserve" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("../..") / folder


def test_functions_do_not_decode_structs_by_type() -> None:
    """msgspec crashes the process if two threads use a Struct type for the first time at once; a decoder that is built
    on import prevents that. transfer/ and scheduler/ have threads.
    """
    found = []
    for folder in ("transfer", "scheduler"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text()
            if "msgspec." not in source:
                continue
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("msgspec."):
                    types = [keyword.value for keyword in node.keywords if keyword.arg == "type"]
                    if any(
                        name.id[:1].isupper() for kind in types for name in ast.walk(kind) if isinstance(name, ast.Name)
                    ):
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
