"""Parser of outputs that are a list of calls in Python syntax, `[f(a=1, b="x"), g()]`: Llama 3.2 and 4, and others."""

import ast
import json
import re
from collections.abc import Mapping

from .call_parser import CallParser, NotACallError
from .python_source import STRING, parse_expression
from .text_parser import Steps

_BEGINNING = re.compile(r"\[\s{0,256}[A-Za-z_][\w.-]{0,255}\(")
_PARTIAL = re.compile(r"\[\s{0,256}([A-Za-z_][\w.-]{0,255})?")
_CONSTANTS = {"true": True, "false": False, "null": None}
_NAME = re.compile(rf"({STRING})|[^\W\d][\w.-]*+(?:(?=\s*+(?:\(|=(?!=)))|())", re.DOTALL)
"""A string, or the name of a function or an argument, or another word. No character is searched twice."""
LONGEST_LIST = 1 << 16


class PythonicParser(CallParser):
    """Parses a list when it is complete. If it is not a list of calls of known tools, it is content."""

    markers = ("<|python_start|>",)
    tags = ("<|python_start|>", "<|python_end|>")

    def _beginning(self) -> Steps[None]:
        if (yield from self._skip_space()) != "[":
            raise NotACallError
        yield from self._list()

    def _parse_calls(self, _marker: str) -> Steps[None]:
        return self._list()

    def _list(self) -> Steps[None]:
        while _BEGINNING.match(self._buffer) is None:
            if self._buffer and (self._final or _PARTIAL.fullmatch(self._buffer) is None):
                raise NotACallError
            yield from self._more()
        end = yield from self._find_end()
        for name, arguments in self._calls_in(self._consume(end)):
            self._begin(name)
            self._argue(arguments)
            self._end()
        yield from self._optional_tag("<|python_end|>")

    def _find_end(self) -> Steps[int]:
        """Returns where the list in the buffer ends. Raises NotACallError if it is longer than LONGEST_LIST."""
        at, depth, quote = 0, 0, ""
        while True:
            while at < len(self._buffer):
                character = self._buffer[at]
                at += 1
                if quote:
                    if character == "\\":
                        at += 1  # the next one is escaped
                    elif character == quote:
                        quote = ""
                elif character in "\"'":
                    quote = character
                elif character in "[({":
                    depth += 1
                elif character in "])}":
                    depth -= 1
                    if depth == 0 and at <= LONGEST_LIST:
                        return at
            if len(self._buffer) > LONGEST_LIST:
                raise NotACallError
            yield from self._more()

    def _calls_in(self, text: str) -> list[tuple[str, str]]:
        """Returns the names and JSON arguments of the calls in a list. Raises NotACallError for any other text."""
        # Replace all names before Python parses the text: they may have hyphens, or be keywords such as `from`.
        stand_ins: dict[str, str] = {}
        parsed = _NAME.sub(
            lambda found: (
                found[0]
                if found[1] or found[2] is not None
                else stand_ins.setdefault(found[0], f"name_{len(stand_ins)}")
            ),
            text,
        )
        names = {stand_in: name for name, stand_in in stand_ins.items()}
        try:
            items = parse_expression(parsed)
            if isinstance(items, ast.List):
                return [self._call(item, names) for item in items.elts]
        except (ValueError, TypeError, RecursionError, MemoryError):
            pass
        raise NotACallError

    def _call(self, item: ast.expr, names: Mapping[str, str]) -> tuple[str, str]:
        if not isinstance(item, ast.Call) or not isinstance(item.func, ast.Name) or item.args:
            raise ValueError("not a call with named arguments")
        name = names.get(item.func.id, "")
        if name not in self._tools:
            raise ValueError(f"no tool is called {name}")
        arguments = {}
        for keyword in item.keywords:
            if keyword.arg is None:
                raise ValueError("not a named argument")
            arguments[names[keyword.arg]] = _value(keyword.value)
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _value(node: ast.expr) -> object:
    """Returns the value of a literal. JSON's true, false and null are accepted, too."""
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
