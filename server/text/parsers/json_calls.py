"""Parsers of families that write calls as JSON: Hermes and Qwen, Llama 3, Mistral, DeepSeek-V3."""

import json
from collections.abc import Callable
from typing import Any, ClassVar

from .call_parser import CallParser, NotACallError, is_one_word
from .json_scanner import JsonValue
from .text_parser import Steps

_ARGUMENT_KEYS = ("arguments", "parameters")


class JsonCallParser(CallParser):
    """Parses the parts of calls that are JSON."""

    only_known_names = False
    """Whether an object whose name is not that of a tool is content. For formats in which no marker precedes a call."""

    def _object(self) -> Steps[None]:
        """Parse a call, `{"name": "f", "arguments": {...}}`. Keys may have any order, and other keys are ignored.
        An object of arguments after the name is emitted as it arrives; other arguments when the call ends.
        """
        name: str | None = None
        arguments, begun = "{}", False
        character = yield from self._tag("{")
        while character != "}":
            if (yield from self._skip_space()) == "}":
                self._consume(1)
                break
            key = _loads((yield from self._value('"')))
            yield from self._tag(":")
            first = yield from self._skip_space()
            if key == "name":
                value = _loads((yield from self._value('"')))
                name = self._checked(value) if name is None else name
            elif key not in _ARGUMENT_KEYS or begun:
                _loads((yield from self._value()))
            elif first == "{" and name is not None:
                self._begin(name)
                begun = True
                yield from self._value(pass_on=self._argue)
            else:
                text = yield from self._value('{"n')
                if (value := _loads(text)) is not None:
                    # some models write the text of the object in a string
                    arguments = (value or "{}") if isinstance(value, str) else text
            character = yield from self._tag(",", "}")
        if name is None:
            raise NotACallError
        if not begun:
            self._begin(name)
            self._argue(arguments)
        self._end()

    def _checked(self, name: str) -> str:
        if not name or (self.only_known_names and name not in self._tools):
            raise NotACallError
        return name

    def _arguments(self) -> Steps[None]:
        """Parse the arguments of a call that has begun, and end the call."""
        yield from self._value(pass_on=self._argue)
        self._end()

    def _value(self, first: str = "", pass_on: Callable[[str], None] = lambda _: None) -> Steps[str]:
        """Take a JSON value and return its text. `pass_on` gets the text as it arrives. Raises NotACallError if the
        value does not begin with a character of `first`; if that is empty, all are allowed.
        """
        if first and self._buffer[0] not in first:
            raise NotACallError
        text, value = "", JsonValue()
        while not value.complete:
            piece = self._consume(value.feed(self._buffer))
            text += piece
            pass_on(piece)
            if value.failed:
                raise NotACallError
            if not value.complete:
                yield from self._more()
        return text


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise NotACallError from None


class HermesParser(JsonCallParser):
    r"""`<tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    tags = ("<tool_call>", "</tool_call>")

    def _parse_calls(self, _marker: str) -> Steps[None]:
        yield from self._object()
        while (yield from self._skip_space()) == "{":  # models write several calls between two tags
            yield from self._object()
        # Some models write a bracket too many before the closing tag: skip a few characters. Without a closing tag
        # nearby the call is complete as well, and the text after it is content.
        _, tag = yield from self._soon("</tool_call>", "<tool_call>")
        if tag == "<tool_call>":
            self._put_back(tag)


class HermesLenientParser(HermesParser):
    r"""Hermes calls, and those that small models write as a code block: "```json", `{"name": "f", "arguments": {...}}`,
    "```". A block may have several such objects, also as a list. Only an object with these two keys and the name of a
    tool is a call, because a code block may be an answer.
    """

    markers = (*HermesParser.markers, "```")
    _in_code = False
    """Whether the last code block was not one of calls, and its end has not been found."""

    def _parse_calls(self, marker: str) -> Steps[None]:
        if marker != "```":
            yield from super()._parse_calls(marker)
            return
        self._in_code = not self._in_code
        if not self._in_code:
            raise NotACallError
        if (yield from self._skip_space()) not in "{[":
            yield from self._tag("json")
        calls_before = self._calls
        tag = yield from self._tag("{", "[")
        while tag != "```":
            if tag == "{":
                yield from self._call_in_code()
            tag = yield from self._tag("{", "[", "]", ",", "```")
            if self._calls > calls_before:
                self._unsure = []
        self._in_code = False
        if self._calls == calls_before:
            raise NotACallError

    def _call_in_code(self) -> Steps[None]:
        """Parse a call after its opening bracket."""
        yield from self._tag('"name"')
        yield from self._tag(":")
        yield from self._skip_space()
        name = _loads((yield from self._value('"')))
        if name not in self._tools:
            raise NotACallError
        yield from self._tag(",")
        yield from self._tag('"arguments"')
        yield from self._tag(":")
        yield from self._skip_space()
        if self._buffer[0] != "{":
            raise NotACallError
        self._begin(name)
        yield from self._value(pass_on=self._argue)
        yield from self._tag("}")
        self._end()


class Llama3Parser(JsonCallParser):
    """`{"name": "f", "parameters": {...}}` as the whole output, after `<|python_tag|>` or not; several after `;`."""

    markers = ("<|python_tag|>",)
    tags = ("<|python_tag|>",)
    only_known_names = True

    def _beginning(self) -> Steps[None]:
        while (yield from self._skip_space()) == "{":
            yield from self._object()
            while (yield from self._skip_space()) == ";":
                self._consume(1)
        raise NotACallError

    def _parse_calls(self, _marker: str) -> Steps[None]:
        return self._beginning()


class MistralParser(JsonCallParser):
    """`[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`, or `[TOOL_CALLS]f[ARGS]{...}` for each call."""

    markers = ("[TOOL_CALLS]",)
    tags = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def _parse_calls(self, _marker: str) -> Steps[None]:
        match (yield from self._skip_space()):
            case "[":
                character = self._consume(1)
                while character != "]":
                    yield from self._object()
                    character = yield from self._tag(",", "]")
            case "{":
                yield from self._object()
            case _:
                yield from self._named_call()

    def _named_call(self) -> Steps[None]:
        name, end = yield from self._name_until("[ARGS]", "[CALL_ID]", "{")
        if not is_one_word(name):
            raise NotACallError
        if end == "[CALL_ID]":
            yield from self._name_until("[ARGS]")
        self._begin(name)
        if end == "{":
            self._put_back(end)
        yield from self._arguments()


CALLS, CALL, SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
CALL_END, CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"


class DeepSeekParser(JsonCallParser):
    r"""DeepSeek-V3 and R1: `function<sep>f\n```json\n{...}\n```` between the tags of a call; V3.1: `f<sep>{...}`."""

    markers = (CALLS, CALL)
    tags = (CALLS, CALL, SEPARATOR, CALL_END, CALLS_END)

    def _parse_calls(self, marker: str) -> Steps[None]:
        tag = marker if marker == CALL else (yield from self._tag(CALL))
        while tag == CALL:
            yield from self._call()
            _, tag = yield from self._soon(CALL_END, CALLS_END, CALL)
            self._unsure = []
            if tag == CALL_END:
                tag = yield from self._tag(CALL, CALLS_END)

    def _call(self) -> Steps[None]:
        kind, _ = yield from self._name_until(SEPARATOR)
        # between the separator and the arguments: nothing (V3.1), or the name and the beginning of a code block (V3)
        before, brace = yield from self._soon("{")
        lines = before.split("\n")
        name = lines[0].strip() or kind
        if not name or any(line.strip() not in ("", "```json", "```") for line in lines[1:]):
            raise NotACallError
        self._begin(name)
        self._put_back(brace)
        yield from self._arguments()
