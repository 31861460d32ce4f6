"""Builds grammars for tool calls, in the format of a model family, as structural tags
(models/grammar/structural_tags.py).

JSON arguments match the schema of their function. In formats with tags around each argument, the arguments have the
order of the schema; a string is any text, or a value of its `enum`, and other values match their schema.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ....common.sampling import MAX_GRAMMAR_CHARACTERS
from ....common.words import shown
from .xml_calls import is_text

Format = dict[str, Any]

_NOTHING: Format = {"type": "const_string", "value": ""}
_SPACE: Format = {"type": "regex", "pattern": r"[ \n]{0,8}"}


class UnwritableCallsError(ValueError):
    """No grammar can be made for calls of these functions; the message says why."""


class _Room:
    """The characters that a grammar may still have. They are counted while it is built: copies of small schemas may add
    up to gigabytes.
    """

    def __init__(self) -> None:
        self._left = MAX_GRAMMAR_CHARACTERS

    def take(self, characters: int) -> None:
        self._left -= characters
        if self._left < 0:
            raise UnwritableCallsError(
                f"make a grammar of more than {MAX_GRAMMAR_CHARACTERS} characters: give fewer or simpler parameters"
            )


@dataclass(frozen=True, slots=True)
class FunctionSchema:
    """A function that may be called. If it is not `strict`, keywords of its schema that cannot be enforced are
    ignored.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ArgumentTags:
    """The text around one argument. In `begin`, `{key}` is replaced by its name and `{string}` by whether its value is
    a string.
    """

    begin: str
    end: str
    separator: str = ""
    text: bool = True
    """Whether strings are written as plain text instead of JSON."""


@dataclass(frozen=True, slots=True)
class CallTags:
    """The text around one call (`begin`, with the function's `{name}`, `end` and `close`), between calls, and around
    all calls. `arguments` is None if the arguments are one JSON object.
    """

    begin: str
    end: str
    separator: str = ""
    list_begin: str = ""
    list_end: str = ""
    arguments: ArgumentTags | None = None
    close: str = ""
    """The part of the end without which the last call is complete, too: some models end their output before it."""
    first_character: str = ""
    """For formats in which the output is either only calls or only text: the character with which calls begin."""

    def calls(self, functions: Sequence[FunctionSchema], *, parallel: bool) -> Format:
        """One or more calls and nothing else but white space. It may stand after every call, also the last one: a model
        that has learned to write a line break there must still be able to end. Raises UnwritableCallsError.
        """
        room = _Room()
        listed: Format = {
            "type": "tags_with_separator",
            "tags": [self._call(function, self.end, room) for function in functions],
            "separator": self.close + self.separator,
            "any_space": True,
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        if self.close:
            return _sequence(listed, _optional(_sequence(_constant(self.close.strip()), _SPACE)))
        if not self.list_begin:
            return listed
        return _sequence(_constant(self.list_begin), listed, _constant(self.list_end), _SPACE)

    def text_with_calls(self, functions: Sequence[FunctionSchema]) -> Format:
        """Any text, with any number of calls of these functions. Raises UnwritableCallsError."""
        if self.first_character:
            other = rf"([^\s\{self.first_character}](.|\n)*)?"
            return {
                "type": "or",
                "elements": [self.calls(functions, parallel=True), {"type": "regex", "pattern": other}],
            }
        if self.list_begin:
            calls = self.calls(functions, parallel=True)["elements"][1]
            tags = [{"begin": self.list_begin, "content": calls, "end": self.list_end}]
            return {"type": "triggered_tags", "triggers": [self.list_begin], "tags": tags}
        trigger = self.begin[: self.begin.index("{name}")].partition("\n")[0]
        room = _Room()
        tags = [self._call(function, self.end + self.close, room) for function in functions]
        return {"type": "triggered_tags", "triggers": [trigger], "tags": tags}

    def _call(self, function: FunctionSchema, end: str, room: _Room) -> Format:
        schema = dict(function.parameters) or {"type": "object", "properties": {}}
        if self.arguments is None:
            content = _json(schema, function)
            room.take(_size(content))
        else:
            content = _arguments(schema, function, self.arguments, room)
        return {
            "type": "tag",
            "begin": self.begin.replace("{name}", function.name),
            "content": content,
            "end": end,
        }


def _arguments(schema: Mapping[str, Any], function: FunctionSchema, tags: ArgumentTags, room: _Room) -> Format:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        properties = {}
    required = schema.get("required")
    needed = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    items: list[tuple[Format, bool]] = []
    sizes: list[int] = []
    all_items = _Room()
    for key, value in properties.items():
        items.append((_argument(key, value, shared, function, tags), key in needed))
        sizes.append(_size(items[-1][0]))
        all_items.take(sizes[-1])
    if not tags.separator:
        room.take(sum(sizes))
        return _sequence(*(item if must else _optional(item) for item, must in items))
    # only the first argument has no separator before it, and optional ones may be absent: hence one alternative for
    # each argument that may be the first
    following = [(_sequence(_constant(tags.separator), item), must) for item, must in items]
    rest = [item if must else _optional(item) for item, must in following]
    alternatives: list[Format] = []
    for at, (item, must) in enumerate(items):
        room.take(sum(sizes[at:]))
        alternatives.append(_sequence(item, *rest[at + 1 :]))
        if must:
            break
    else:
        alternatives.append(_NOTHING)
    return {"type": "or", "elements": alternatives}


def _argument(key: str, schema: Any, shared: Mapping[str, Any], function: FunctionSchema, tags: ArgumentTags) -> Format:
    text = tags.text and is_text(schema) is True
    begin = tags.begin.replace("{key}", key).replace("{string}", "true" if text else "false")
    written = msgspec.json.encode(schema).decode()
    closing = tags.end.strip()  # the string ends here even if the model leaves out the line break before it
    if closing and closing in written and (value := _value_with(closing, schema)) is not None:
        raise UnwritableCallsError(
            f"cannot be called in the format of this model: a value of {shown(key)} of {shown(function.name)}, "
            f"{shown(value)}, has the text {closing}, which ends a value"
        )
    choices = _choices(schema) if text else None
    content: Format
    if choices is not None:
        content = {"type": "or", "elements": [{**_constant(choice), "text": True} for choice in choices]}
    elif text:
        string = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": closing}
        return _sequence(string, _constant(tags.end.partition(closing)[2]))
    else:
        has_definitions = isinstance(schema, Mapping) and '"$ref"' in written
        content = _json({**schema, **shared} if has_definitions else schema, function)
    return {"type": "tag", "begin": begin, "content": content, "end": tags.end}


def _choices(schema: Mapping[str, Any]) -> list[str] | None:
    """The strings that a schema lists; None if it lists none, or other values."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    return choices if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices) else None


def _value_with(text: str, schema: object) -> str | None:
    """A string in an `enum` or `const` of a schema that contains `text`."""
    waiting = [(schema, False)]
    while waiting:
        part, listed = waiting.pop()
        if isinstance(part, str) and listed and text in part:
            return part
        if isinstance(part, Mapping):
            waiting += ((value, listed or name in ("enum", "const")) for name, value in part.items())
        elif isinstance(part, list):
            waiting += ((value, listed) for value in part)
    return None


def _size(content: Format) -> int:
    """At most the characters of the content in the grammar, and more than a fourth of them."""
    return len(msgspec.json.encode(content))


def _json(schema: object, function: FunctionSchema) -> Format:
    return {"type": "json_schema", "json_schema": schema, "lenient": not function.strict}


def _constant(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _optional(item: Format) -> Format:
    return {"type": "or", "elements": [item, _NOTHING]}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}
