"""Builds grammars for tool calls, in the format of a model family, as structural tags
(models/grammar/structural_tags.py).

JSON arguments match the schema of their function. In formats with tags around each argument, the arguments have the
order of the schema; a string is any text, or a value of its `enum`, and other values match their schema.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .xml_calls import is_text

Format = dict[str, Any]

_NOTHING: Format = {"type": "const_string", "value": ""}
_SPACE: Format = {"type": "regex", "pattern": r"[ \n]{0,8}"}


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
        that has learned to write a line break there must still be able to end.
        """
        listed: Format = {
            "type": "tags_with_separator",
            "tags": [self._call(function, self.end) for function in functions],
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
        """Any text, with any number of calls of these functions."""
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
        tags = [self._call(function, self.end + self.close) for function in functions]
        return {"type": "triggered_tags", "triggers": [trigger], "tags": tags}

    def _call(self, function: FunctionSchema, end: str) -> Format:
        schema = dict(function.parameters) or {"type": "object", "properties": {}}
        content = _json(schema, function) if self.arguments is None else _arguments(schema, function, self.arguments)
        return {
            "type": "tag",
            "begin": self.begin.replace("{name}", function.name),
            "content": content,
            "end": end,
        }


def _arguments(schema: Mapping[str, Any], function: FunctionSchema, tags: ArgumentTags) -> Format:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        properties = {}
    required = schema.get("required") or ()
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    items = [(_argument(key, value, shared, function, tags), key in required) for key, value in properties.items()]
    if not tags.separator:
        return _sequence(*(item if needed else _optional(item) for item, needed in items))
    # only the first argument has no separator before it, and optional ones may be absent: hence one alternative for
    # each argument that may be the first
    alternatives: list[Format] = []
    for at, (item, needed) in enumerate(items):
        rest = [
            after if must else _optional(after)
            for after, must in ((_sequence(_constant(tags.separator), each), must) for each, must in items[at + 1 :])
        ]
        alternatives.append(_sequence(item, *rest))
        if needed:
            break
    else:
        alternatives.append(_NOTHING)
    return {"type": "or", "elements": alternatives}


def _argument(key: str, schema: Any, shared: Mapping[str, Any], function: FunctionSchema, tags: ArgumentTags) -> Format:
    text = tags.text and is_text(schema) is True
    begin = tags.begin.replace("{key}", key).replace("{string}", "true" if text else "false")
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    content: Format
    if text and isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
        content = {"type": "or", "elements": [_constant(choice) for choice in choices]}
    elif text:
        # the string ends at the closing tag even if the model leaves out the line break before it, as in the parser
        closing = tags.end.strip()
        string = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": closing}
        return _sequence(string, _constant(tags.end.partition(closing)[2]))
    else:
        content = _json({**schema, **shared} if isinstance(schema, Mapping) else schema, function)
    return {"type": "tag", "begin": begin, "content": content, "end": tags.end}


def _json(schema: object, function: FunctionSchema) -> Format:
    return {"type": "json_schema", "json_schema": schema, "lenient": not function.strict}


def _constant(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _optional(item: Format) -> Format:
    return {"type": "or", "elements": [item, _NOTHING]}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}
