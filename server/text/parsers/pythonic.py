"""Calls in Python's syntax as the whole output, `[f(a=1, b="x"), g()]`: Llama 3.2 and 4, and others."""

import ast
import json
import re
import warnings
from collections.abc import Callable

from .call_parser import CallParser, Tools

_BEGINNING = re.compile(r"\[\s*[A-Za-z_][\w.-]{0,255}\(")
_PARTIAL = re.compile(r"\[\s*([A-Za-z_][\w.-]{0,255})?")
_CONSTANTS = {"true": True, "false": False, "null": None}
LONGEST_LIST = 1 << 16


class PythonicParser(CallParser):
    """A list is parsed when it is complete, and its calls have known names; otherwise it is content."""

    markers = ("<|python_start|>",)
    tags = ("<|python_start|>", "<|python_end|>")

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._list_end = _ListEnd()

    def _start(self) -> bool:
        if not self._skip_space():
            return False
        if self._buffer[0] == "[":
            self._step = self._list
        else:
            self._give_up()
        return True

    def _marker(self, marker: str) -> Callable[[], bool]:
        self._consume(len(marker))
        return self._list

    def _list(self) -> bool:
        """The whole list, which must not be longer than LONGEST_LIST."""
        if _BEGINNING.match(self._buffer) is None:
            may_follow = not self._final and _PARTIAL.fullmatch(self._buffer) is not None
            if self._buffer and not may_follow:
                self._give_up()
                return True
            return False
        end = self._list_end.feed(self._buffer)
        if end is None:
            if len(self._buffer) > LONGEST_LIST:
                self._give_up()
                return True
            return False
        self._list_end = _ListEnd()
        calls = self._parse(self._buffer[:end]) if end <= LONGEST_LIST else None
        self._consume(end)
        if calls is None:
            self._give_up()
            return True
        for name, arguments in calls:
            self._begin(name)
            self._argue(arguments)
            self._end()
        self._step = self._close
        return True

    def _close(self) -> bool:
        self._skip_space()
        if self._match("<|python_end|>") is None:
            return False
        self._unsure = ""
        self._step = self._content
        return True

    def _parse(self, text: str) -> list[tuple[str, str]] | None:
        """The names and arguments of the calls in a list; None if it is something else."""
        try:
            with warnings.catch_warnings(action="ignore"):  # of escapes such as "\\d"
                items = ast.parse(text, mode="eval").body
            return [self._call(item) for item in items.elts] if isinstance(items, ast.List) else None
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None

    def _call(self, item: ast.expr) -> tuple[str, str]:
        if not isinstance(item, ast.Call) or item.args:
            raise ValueError("not a call with named arguments")
        name = ast.unparse(item.func)
        if name not in self._tools:
            raise ValueError(f"no tool is called {name}")
        arguments = {}
        for keyword in item.keywords:
            if keyword.arg is None:
                raise ValueError("not a named argument")
            arguments[keyword.arg] = _value(keyword.value)
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _value(node: ast.expr) -> object:
    """A literal; JSON's names of constants are accepted too."""
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError(f"{value!r} has no JSON")
    return value


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError("a key must be a string")
    return node.value


class _ListEnd:
    """Finds where a list ends. `feed` takes the same text, longer every time, and looks at the new characters only."""

    def __init__(self) -> None:
        self._seen = 0
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def feed(self, text: str) -> int | None:
        for at in range(self._seen, len(text)):
            character = text[at]
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in "[({":
                self._depth += 1
            elif character in "])}":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        self._seen = len(text)
        return None
