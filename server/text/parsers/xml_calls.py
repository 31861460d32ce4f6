"""Families that write each argument between tags: Qwen3-Coder, GLM, DeepSeek-V3.2 (DSML).

Values are text. The schema of the function, or an attribute of the tag, says which are strings; others are JSON.
"""

import ast
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from .call_parser import LONGEST_NAME, CallParser, Tools
from .text_parser import partial_marker


def is_text(schema: object) -> bool | None:
    """Whether values of a schema are strings; None if it does not say."""
    if not isinstance(schema, Mapping):
        return None
    kind = schema.get("type")
    if isinstance(kind, str):
        return kind == "string"
    values = schema.get("enum")
    if kind is None and isinstance(values, list) and values:
        return all(isinstance(value, str) for value in values)
    return None


def to_json(text: str) -> str:
    """The JSON of a value that may be anything but is written as text: JSON, Python's spelling of it, or a string."""
    try:
        json.loads(text, parse_constant=_refuse_constant)
        return text.strip()
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(ast.literal_eval(text.strip()), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> NoReturn:
    """NaN and Infinity, which Python's parser accepts."""
    raise ValueError(f"{name} is not JSON")


class XmlCallParser(CallParser):
    """The states after the name of a call: arguments, until the end of the call."""

    value_end: str
    padding = ""
    """What stands between a value and its tags."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._schemas: Mapping[str, Any] = {}
        self._given = 0
        self._at_start = False

    @abstractmethod
    def _next(self) -> bool:
        """The next argument, or the end of the call."""

    def _begin_call(self, name: str) -> None:
        properties = self._tools.get(name, {}).get("properties")
        self._schemas = properties if isinstance(properties, Mapping) else {}
        self._given = 0
        self._begin(name)
        self._argue("{")
        self._step = self._next

    def _end_call(self, step: Callable[[], bool]) -> None:
        self._argue("}")
        self._end()
        self._step = step

    def _begin_value(self, key: str, is_string: bool | None) -> None:
        """The value of an argument follows. Strings are passed on as they arrive."""
        self._argue((", " if self._given else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._given += 1
        self._at_start = True
        self._step = self._string_value if is_string else self._other_value
        if is_string:
            self._argue('"')

    def _string_value(self) -> bool:
        if self._at_start:
            if self.padding and self._match(self.padding) is None:
                return False
            self._at_start = False
        end = self.padding + self.value_end
        at = min((at for at in (self._buffer.find(end), self._buffer.find(self.value_end)) if at >= 0), default=-1)
        if at >= 0:
            self._argue_escaped(self._take(at))
            self._take(len(end) if self._buffer.startswith(end) else len(self.value_end))
            self._argue('"')
            self._step = self._next
            return True
        held = partial_marker(self._buffer, (end, self.value_end))
        self._argue_escaped(self._take(len(self._buffer) - held))
        return False

    def _other_value(self) -> bool:
        found = self._until(self.value_end)
        if found is None:
            return False
        text = found[0]
        if self.padding:
            text = text.removeprefix(self.padding).removesuffix(self.padding)
        self._argue(to_json(text))
        self._step = self._next
        return True

    def _argue_escaped(self, text: str) -> None:
        if text:
            self._argue(json.dumps(text, ensure_ascii=False)[1:-1])


class Qwen3CoderParser(XmlCallParser):
    r"""`<tool_call>\n<function=f>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>`."""

    markers = ("<tool_call>", "<function=")
    tags = ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>")
    value_end = "</parameter>"
    padding = "\n"

    def _marker(self, marker: str) -> Callable[[], bool]:
        if marker == "<tool_call>":
            self._consume(len(marker))
        return self._function

    def _function(self) -> bool:
        self._skip_space()
        matched = self._match("<function=")
        if matched:
            self._step = self._name
        elif matched is not None:
            self._give_up()
        return matched is not None

    def _name(self) -> bool:
        found = self._until(">", longest=LONGEST_NAME)
        if found is None:
            return self._step != self._name
        if name := found[0].strip():
            self._begin_call(name)
        else:
            self._give_up()
        return True

    def _next(self) -> bool:
        found = self._until("<parameter=", "</function>", "</tool_call>")
        if found is None:
            return False
        match found[1]:
            case "<parameter=":
                self._step = self._key
            case "</function>":
                self._end_call(self._close)
            case _:
                self._end_call(self._content)
        return True

    def _key(self) -> bool:
        found = self._until(">", longest=LONGEST_NAME)
        if found is None:
            return self._step != self._key
        key = found[0].strip()
        self._begin_value(key, is_text(self._schemas.get(key)))
        return True

    def _close(self) -> bool:
        self._skip_space()
        matched = self._match("</tool_call>")
        if matched is None:
            return False
        self._unsure = ""
        self._step = self._content
        return True


class GlmParser(XmlCallParser):
    """`<tool_call>f<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`; GLM-4.5 has line breaks between."""

    markers = ("<tool_call>",)
    tags = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    value_end = "</arg_value>"

    def _marker(self, marker: str) -> Callable[[], bool]:
        self._consume(len(marker))
        return self._name

    def _name(self) -> bool:
        self._skip_space()
        found = self._until("\n", "<arg_key>", "</tool_call>", longest=LONGEST_NAME)
        if found is None:
            return self._step != self._name
        name = found[0].strip()
        if not name or any(character.isspace() for character in name):
            self._give_up()
            return True
        self._begin_call(name)
        self._buffer = found[1] + self._buffer
        return True

    def _next(self) -> bool:
        found = self._until("<arg_key>", "</tool_call>")
        if found is None:
            return False
        if found[1] == "<arg_key>":
            self._step = self._key
        else:
            self._end_call(self._content)
        return True

    def _key(self) -> bool:
        found = self._until("</arg_key>", longest=LONGEST_NAME)
        if found is None:
            return self._step != self._key
        self._argument = found[0].strip()
        self._step = self._value_tag
        return True

    def _value_tag(self) -> bool:
        self._skip_space()
        matched = self._match("<arg_value>")
        if matched:
            self._begin_value(self._argument, is_text(self._schemas.get(self._argument)))
        elif matched is not None:
            self._give_up()
        return matched is not None


class DsmlParser(XmlCallParser):
    """DeepSeek-V3.2: `<｜DSML｜invoke name="f">`, in it `<｜DSML｜parameter name="key" string="true">value` with its
    end tag. All calls stand between the tags of `function_calls`, in V4 of `tool_calls`.
    """

    markers = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    tags = ("｜DSML｜",)
    value_end = "</｜DSML｜parameter>"

    def _marker(self, marker: str) -> Callable[[], bool]:
        self._consume(len(marker))
        self._end_tag = "</" + marker[1:]
        return self._invoke

    def _invoke(self) -> bool:
        """A call, or the end of all calls."""
        self._skip_space()
        for tag, step in (('<｜DSML｜invoke name="', self._name), (self._end_tag, self._content)):
            matched = self._match(tag)
            if matched is None:
                return False
            if matched:
                if tag == self._end_tag and self._after_call:
                    self._unsure = ""
                self._step = step
                return True
        self._give_up()
        return True

    def _name(self) -> bool:
        found = self._until('">', longest=LONGEST_NAME)
        if found is None:
            return self._step != self._name
        self._begin_call(found[0])
        return True

    def _next(self) -> bool:
        found = self._until('<｜DSML｜parameter name="', "</｜DSML｜invoke>", self._end_tag)
        if found is None:
            return False
        match found[1]:
            case "</｜DSML｜invoke>":
                self._end_call(self._invoke)
            case self._end_tag:
                self._end_call(self._content)
            case _:
                self._step = self._key
        return True

    def _key(self) -> bool:
        found = self._until('">', longest=LONGEST_NAME)
        if found is None:
            return self._step != self._key
        key, _, attribute = found[0].partition('" string="')
        self._begin_value(key, attribute == "true" if attribute else is_text(self._schemas.get(key)))
        return True
