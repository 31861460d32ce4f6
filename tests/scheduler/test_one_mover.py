"""Rooms hold requests and never call up: only transitions.py moves requests from one state to the next."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "scheduler"
ABOVE = ("transitions.py", "submissions.py", "scheduler.py", "balancer.py")
"""Files above the rooms."""


def nodes(role: str) -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted((ROOT / role).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path, node


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_only_transitions_change_the_state_of_a_request(role: str) -> None:
    movers = {
        path.name
        for path, node in nodes(role)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("lifecycle.advance")
    }
    assert movers == {"transitions.py"}


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_no_room_calls_up(role: str) -> None:
    """Neither into a file above it, nor through a function that it was given when it was made."""
    calls = [
        f"{path.name}:{node.lineno} {ast.unparse(node)[:60]}"
        for path, node in nodes(role)
        if (
            path.name not in ABOVE
            and isinstance(node, ast.ImportFrom)
            and f"{(node.module or '').split('.')[-1]}.py" in ABOVE
        )
        or (isinstance(node, ast.FunctionDef) and node.name == "__init__" and "Callable" in ast.unparse(node.args))
    ]
    assert calls == []
