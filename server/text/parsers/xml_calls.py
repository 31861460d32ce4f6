"""Parsers of families that write each argument between tags: Qwen3-Coder, GLM, DeepSeek-V3.2 (DSML).

The schema of the function, or an attribute of the tag, says which values are strings. Strings are written as plain
text, other values as JSON.
"""

import ast
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from .call_parser import CallParser, NotACallError, Tools, is_one_word
from .python_source import parse_expression
from .text_parser import Steps, partial_marker

MOST_PARTS = 256
"""So many parts of a schema are searched for the types of its values."""


def is_text(schema: object) -> bool | None:
    """Whether the values of a schema are strings; None if the schema does not say."""
    if not isinstance(schema, Mapping):
        return None
    kind = schema.get("type")
    if isinstance(kind, str):
        return kind == "string"
    values = schema.get("enum")
    if kind is None and isinstance(values, list) and values:
        return all(isinstance(value, str) for value in values)
    return None


def kinds_of(schema: object, root: Mapping[str, Any]) -> frozenset[str] | None:
    """The JSON types that values of a schema may have; None if it does not say. `$ref` is resolved in `root`.

    Looks at each part of the schema once, and at MOST_PARTS of them; a larger schema does not say.
    """
    kinds: set[str] = set()
    seen: set[int] = set()
    parts = [schema]
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        match part:
            case {"type": str(kind)}:
                kinds.add(kind)
            case {"type": [*names]} if len(names) <= MOST_PARTS:
                kinds.update(name for name in names if isinstance(name, str))
            case {"anyOf": [*options]} | {"oneOf": [*options]} if len(options) <= MOST_PARTS - len(seen):
                parts += options
            case {"allOf": [only]}:
                parts.append(only)
            case {"$ref": str(path)} if path.startswith("#/"):
                target: Any = root
                for name in path.removeprefix("#/").split("/", MOST_PARTS):
                    target = target.get(name) if isinstance(target, Mapping) else None
                parts.append(target)
            case _:
                return None
        if len(seen) > MOST_PARTS:
            return None
    return frozenset(kinds) or None


def to_json(text: str, kinds: frozenset[str] | None = None) -> str:
    """Converts the text of a value to JSON. The text may be JSON, a Python literal, or a plain string. If `kinds`
    allows strings, the text is a string unless it is a value of another allowed kind.
    """
    try:
        value, written = json.loads(text, parse_constant=_refuse_constant), text.strip()
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(parse_expression(text.strip()))
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            value, written = text, json.dumps(text, ensure_ascii=False)
    if kinds is not None and "string" in kinds and not kinds & _KINDS.get(type(value), frozenset()):
        return json.dumps(text, ensure_ascii=False)
    return written


_KINDS = {
    str: frozenset(("string",)),
    int: frozenset(("integer", "number")),
    float: frozenset(("number",)),
    bool: frozenset(("boolean",)),
    type(None): frozenset(("null",)),
    list: frozenset(("array",)),
    tuple: frozenset(("array",)),
    dict: frozenset(("object",)),
}
"""The JSON types of a parsed value."""


def _refuse_constant(name: str) -> NoReturn:
    """Refuses NaN and Infinity, which Python's JSON parser accepts."""
    raise ValueError(f"{name} is not JSON")


class XmlCallParser(CallParser):
    """Parses the part of a call after its name."""

    value_end: str
    padding = ""
    """Text between a value and its tags, which is removed."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._parameters: Mapping[str, Any] = {}
        self._schemas: Mapping[str, Any] = {}
        self._text_arguments: dict[tuple[str, str], bool | None] = {}
        """What `is_text` says, by function and argument: an `enum` may be long."""
        self._function = ""
        self._given = 0

    def _begin_call(self, name: str) -> None:
        self._parameters = self._tools.get(name, {})
        properties = self._parameters.get("properties")
        self._schemas = properties if isinstance(properties, Mapping) else {}
        self._function, self._given = name, 0
        self._begin(name)
        self._argue("{")

    def _end_call(self) -> None:
        self._argue("}")
        self._end()

    def _value(self, key: str, *, is_string: bool | None = None) -> Steps[None]:
        """Parse the value of an argument. If `is_string` is None, the schema says whether it is a string. Strings are
        emitted as they arrive, other values when they are complete.
        """
        self._argue((", " if self._given else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._given += 1
        if self._is_text(key) if is_string is None else is_string:
            self._argue('"')
            yield from self._string()
            self._argue('"')
        else:
            text, _ = yield from self._until(self.value_end)
            kinds = kinds_of(self._schemas.get(key), self._parameters) if is_string is None else None
            self._argue(to_json(text.removeprefix(self.padding).removesuffix(self.padding), kinds))

    def _is_text(self, key: str) -> bool | None:
        if key not in self._schemas:
            return None
        if (self._function, key) not in self._text_arguments:
            self._text_arguments[self._function, key] = is_text(self._schemas[key])
        return self._text_arguments[self._function, key]

    def _string(self) -> Steps[None]:
        while not self._buffer:
            yield from self._more()
        self._buffer = self._buffer.removeprefix(self.padding)
        while self.value_end not in self._buffer:
            held = partial_marker(self._buffer, (self.padding + self.value_end, self.value_end))
            self._argue_escaped(self._take(len(self._buffer) - held))
            yield from self._more()
        text, _, self._buffer = self._buffer.partition(self.value_end)
        self._argue_escaped(text.removesuffix(self.padding))

    def _argue_escaped(self, text: str) -> None:
        self._argue(json.dumps(text, ensure_ascii=False)[1:-1])


class Qwen3CoderParser(XmlCallParser):
    r"""`<tool_call>\n<function=f>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>`."""

    markers = ("<tool_call>", "<function=")
    tags = ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>")
    value_end = "</parameter>"
    padding = "\n"

    def _parse_calls(self, marker: str) -> Steps[None]:
        if marker == "<tool_call>":
            yield from self._tag("<function=")
        name, _ = yield from self._name_until(">")
        if not name:
            raise NotACallError
        self._begin_call(name)
        while (tag := (yield from self._skip_to("<parameter=", "</function>", "</tool_call>"))) == "<parameter=":
            key, _ = yield from self._name_until(">")
            yield from self._value(key)
        self._end_call()
        if tag == "</function>":
            yield from self._optional_tag("</tool_call>")


class GlmParser(XmlCallParser):
    """`<tool_call>f<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`; GLM-4.5 has line breaks between."""

    markers = ("<tool_call>",)
    tags = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    value_end = "</arg_value>"

    def _parse_calls(self, _marker: str) -> Steps[None]:
        yield from self._skip_space()
        name, tag = yield from self._name_until("\n", "<arg_key>", "</tool_call>")
        if not is_one_word(name):
            raise NotACallError
        self._begin_call(name)
        self._put_back(tag)
        while (yield from self._skip_to("<arg_key>", "</tool_call>")) == "<arg_key>":
            key, _ = yield from self._name_until("</arg_key>")
            yield from self._tag("<arg_value>")
            yield from self._value(key)
        self._end_call()


class DsmlParser(XmlCallParser):
    """DeepSeek-V3.2: `<｜DSML｜invoke name="f">` contains `<｜DSML｜parameter name="key" string="true">value`, both
    with end tags. All calls are between the tags of `function_calls`; in V4, of `tool_calls`.
    """

    markers = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    tags = ("｜DSML｜",)
    value_end = "</｜DSML｜parameter>"

    def _parse_calls(self, marker: str) -> Steps[None]:
        invoke, parameter, end = '<｜DSML｜invoke name="', '<｜DSML｜parameter name="', "</" + marker[1:]
        while (yield from self._tag(invoke, end)) == invoke:
            name, _ = yield from self._soon('">')
            if (yield from self._skip_space()) == "{":  # the model has written the arguments as a JSON object instead
                self._begin(name)
                arguments, _ = yield from self._until("</｜DSML｜invoke>")
                self._argue(arguments.strip())
                self._end()
                continue
            self._begin_call(name)
            while (tag := (yield from self._skip_to(parameter, "</｜DSML｜invoke>", end))) == parameter:
                attributes, _ = yield from self._soon('">')
                key, _, string = attributes.partition('" string="')
                yield from self._value(key, is_string=string == "true" if string else None)
            self._end_call()
            if tag == end:
                return
        if not self._after_call:
            raise NotACallError  # no call between the tags
