"""A format of weights is a file: nothing else in the product names its classes."""

import ast
from pathlib import Path

import pytest

from tests.import_graph import ROOT

PRODUCT = ("server", "scheduler", "models", "memory", "transfer", "kernels", "configs", "common")
SHARED = {"weight", "slots", "format", "schemes", "noise", "plain"}
"""The files of models/weights/ that are no format."""
OPERANDS = {"Fp8Matrix", "GroupScaled", "GgufBlocks", "GgufRows"}
"""What kernels read of them: the classes of operations, which only formats and operations name."""
DISPATCHES = {
    "kernels/linear/few_rows_triton.py",
    "kernels/moe/experts.py",
    "kernels/moe/expert_tiles_cuda.py",
    "kernels/moe/token_experts_cuda.py",
}
"""Operations that still choose by the class of an operand."""


def format_classes() -> set[str]:
    """The classes of the files of formats, and of schemes."""
    folder, found = ROOT / "models/weights", set()
    for path in folder.glob("*.py"):
        names = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
        if path.stem not in SHARED:
            found |= names
        elif path.stem == "schemes":
            found |= names - {"Scheme"}
    return found


def product() -> list[Path]:
    return [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]


def names_in(tree: ast.AST) -> set[str]:
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return found | {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_only_formats_name_formats() -> None:
    classes = format_classes()
    assert {"Fp8Weight", "Packed4Format", "Mxfp4Checkpoint", "GgufWeight", "Fp8Scheme"} <= classes
    for path in product():
        if path.parent != ROOT / "models/weights":
            named = names_in(ast.parse(path.read_text())) & classes
            assert not named, f"{place(path)} names {sorted(named)}"


def test_only_formats_and_operations_name_operands() -> None:
    for path in product():
        if path.parent != ROOT / "models/weights" and not place(path).startswith("kernels/"):
            named = names_in(ast.parse(path.read_text())) & OPERANDS
            assert not named, f"{place(path)} names {sorted(named)}"


def test_dispatch_on_operands_only_shrinks() -> None:
    found = {
        place(path)
        for path in product()
        for node in ast.walk(ast.parse(path.read_text()))
        if path.parent != ROOT / "models/weights"
        and isinstance(node, ast.Call)
        and getattr(node.func, "id", None) == "isinstance"
        and names_in(node.args[1]) & OPERANDS
    }
    assert found == DISPATCHES, "remove what no longer chooses, add nothing"


@pytest.mark.parametrize("name", ["fp8", "int4", "gguf"])
def test_no_parameter_names_a_format(name: str) -> None:
    for path in product():
        if place(path).startswith(("models/", "scheduler/", "server/plan/sizes.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name not in {"plan_sizes", "_outline", "_expand"}:
                    arguments = [*node.args.args, *node.args.kwonlyargs]
                    assert name not in [argument.arg for argument in arguments], f"{place(path)}: {node.name}"
