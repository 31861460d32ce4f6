"""Rooms hold requests and never call up: only transitions.py moves requests from one state to the next."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "scheduler" / "decode"
ABOVE = ("transitions.py", "submissions.py", "scheduler.py", "balancer.py")
"""Files above the rooms."""


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path, node


def test_only_transitions_change_the_state_of_a_request() -> None:
    movers = {
        path.name
        for path, node in nodes()
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("lifecycle.advance")
    }
    assert movers == {"transitions.py"}


def test_no_room_calls_up() -> None:
    """Neither into a file above it, nor through a function that it was given when it was made."""
    calls = [
        f"{path.name}:{node.lineno} {ast.unparse(node)[:60]}"
        for path, node in nodes()
        if path.name not in ABOVE
        and (
            (isinstance(node, ast.ImportFrom) and f"{(node.module or '').split('.')[-1]}.py" in ABOVE)
            or (isinstance(node, ast.FunctionDef) and node.name == "__init__" and "Callable" in ast.unparse(node.args))
        )
    ]
    assert calls == []
