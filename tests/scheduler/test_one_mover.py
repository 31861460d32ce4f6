"""Rooms hold requests and never call up: only transitions.py moves requests from one state to the next."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "scheduler"
ABOVE = {"transitions", "submissions", "scheduler", "balancer", "placer", "deadlines"}
"""Files above the rooms."""
EVENTS = {"PrefillDone", "TransferFailed", "ChunkArrived", "AbortAck", "KvVerified", "CopyDone", "PartScattered"}


def movers(name: str, tree: ast.Module) -> list[str]:
    """Where a request enters a state, outside of transitions.py."""
    if name == "transitions":
        return []
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    return [f"{name}:{call.lineno} moves a request" for call in calls if ast.unparse(call.func).endswith(".enter")]


def ways_up(name: str, tree: ast.Module) -> list[str]:
    """How a file reaches the files above it: by an import, through a function that it is given, or by handing back an
    event that it was given, for its caller to go on with.
    """
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module) if name not in ABOVE and (module or "").split(".")[-1] in ABOVE:
                found.append(f"{name}:{node.lineno} imports {module}")
            case ast.FunctionDef(args=arguments) if "Callable" in ast.unparse(arguments):
                found.append(f"{name}:{node.lineno} {node.name}() is given a function")
            case ast.AnnAssign(annotation=annotation) if "Callable" in ast.unparse(annotation):
                found.append(f"{name}:{node.lineno} keeps a function")
            case ast.Call(func=function, args=arguments) if any(
                isinstance(given, ast.Lambda) for given in arguments
            ) and ast.unparse(function).startswith("self."):
                found.append(f"{name}:{node.lineno} passes a lambda on")
            case ast.FunctionDef(returns=ast.expr() as returns) if name not in ABOVE:
                names = {each.id for each in ast.walk(returns) if isinstance(each, ast.Name)} & EVENTS
                made = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
                found += [f"{name}:{node.lineno} {node.name}() hands back {event}" for event in names - made]
            case _:
                pass
    return found


def modules(role: str) -> list[tuple[str, ast.Module]]:
    paths = sorted((ROOT / role).rglob("*.py"))
    return [(path.stem, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_only_transitions_change_the_state_of_a_request(role: str) -> None:
    assert [found for name, tree in modules(role) for found in movers(name, tree)] == []
    (tree,) = [tree for name, tree in modules(role) if name == "transitions"]
    assert movers("elsewhere", tree)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_no_room_calls_up(role: str) -> None:
    assert [found for name, tree in modules(role) for found in ways_up(name, tree)] == []


@pytest.mark.parametrize(
    "code",
    [
        "from ..transitions import Transitions",
        "class Room:\n    def __init__(self, ended: Callable[[Request], None]) -> None: ...",
        "class Room:\n    def in_order(self, may_send: Callable[[Prompt], bool]) -> Iterator[Prompt]: ...",
        "self.on_ended: Callable[[Request], None] = end",
        "self.copies.begin(grant, lambda: self.admit(request))",
        "def scattered(self, part: StagePart) -> PrefillDone | None:\n    return self.transfer.done",
    ],
)
def test_every_way_up_is_found(code: str) -> None:
    assert len(ways_up("room", ast.parse(code))) == 1
