"""Fields that constrain the output by a grammar: SGLang's, OpenAI's `response_format`, vLLM's `structured_outputs`."""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, PlainValidator, WithJsonSchema

from ....configs.sampling import Grammar
from ....configs.words import shown
from .fields import Body, FieldError, Text, optional, problem

_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}]}
_IGNORED_OPTIONS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
_STRUCTURED_KINDS: dict[str, Literal["json_schema", "regex", "ebnf", "choice", "structural_tag"]] = {
    "json": "json_schema",
    "json_object": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
_ANY_OBJECT = '{"type": "object"}'

NamedGrammar = tuple[str, Grammar]
"""The field that a grammar comes from, and the grammar."""


def _encoded(value: object) -> str:
    """A JSON value as text. Text is taken as it is: clients send a schema as an object or as its JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _schema_text(value: object) -> str:
    if not isinstance(value, dict | bool | str):
        raise problem(f"must be a JSON schema, as an object or as text, got {shown(value)}")
    return _encoded(value)


def _tag_text(value: object) -> str:
    if not isinstance(value, dict | str):
        raise problem(f"must be a structural tag, as an object or as text, got {shown(value)}")
    return _encoded(value)


SchemaText = Annotated[str, PlainValidator(_schema_text), WithJsonSchema(_SCHEMA)]
TagText = Annotated[str, PlainValidator(_tag_text), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})]


class GrammarFields(Body):
    """At most one grammar for a request."""

    json_schema: SchemaText | None = optional("The output is JSON that matches this schema; an object, or its text.")
    regex: Text | None = optional("The whole output matches this regular expression (Rust syntax).")
    ebnf: Text | None = optional("The output matches this grammar: GBNF with a rule `root`, or Lark.")
    structural_tag: TagText | None = optional("Text in which given strings begin structured parts; SGLang's object.")

    def grammars(self) -> list[NamedGrammar]:
        given: dict[str, Grammar | None] = {
            "json_schema": None if self.json_schema is None else Grammar("json_schema", self.json_schema),
            "regex": None if self.regex is None else Grammar("regex", self.regex),
            "ebnf": None if self.ebnf is None else Grammar("ebnf", self.ebnf),
            "structural_tag": None if self.structural_tag is None else Grammar("structural_tag", self.structural_tag),
        }
        return [(name, grammar) for name, grammar in given.items() if grammar is not None]

    def grammar(self, path: str = "") -> NamedGrammar | None:
        """The grammar of the output, if any, with the name of its field; `path` goes before it."""
        found = self.grammars()
        if len(found) > 1:
            names = ", ".join(path + name for name, _ in found)
            raise FieldError(path + found[1][0], f"cannot be combined with another grammar: {names} were given")
        return (path + found[0][0], found[0][1]) if found else None


def _check_format(value: dict[str, Any]) -> dict[str, Any]:
    match value.get("type"):
        case "json_schema":
            wrapper = value.get("json_schema")
            if not isinstance(wrapper, dict):
                raise problem(f"must be an object, got {shown(wrapper)}", "json_schema")
            if not isinstance(wrapper.get("schema"), dict | bool):
                raise problem(f"must be a JSON schema, got {shown(wrapper.get('schema'))}", "json_schema.schema")
        case "text" | "json_object" | "structural_tag":
            pass
        case kind:
            raise problem(f"must be text, json_object, json_schema or structural_tag, got {shown(kind)}", "type")
    return value


def _check_structured(value: dict[str, Any]) -> dict[str, Any]:
    allowed: dict[str, tuple[type, ...]] = {
        "json": (dict, bool, str),
        "json_object": (bool,),
        "regex": (str,),
        "choice": (list,),
        "grammar": (str,),
        "structural_tag": (dict, str),
    }
    for name, given in value.items():
        if given is None or name in _IGNORED_OPTIONS:
            continue
        if name not in allowed:
            raise problem("is not supported by this server", name)
        if not isinstance(given, allowed[name]):
            raise problem(f"has a value of the wrong type: {shown(given)}", name)
    return value


ResponseFormat = Annotated[
    dict[str, Any],
    AfterValidator(_check_format),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"},
                        "description": {"type": "string"},
                        "schema": {"type": "object"},
                        "strict": {"type": "boolean"},
                    },
                    "required": ["schema"],
                },
            },
            "required": ["type"],
        }
    ),
]
StructuredOutputs = Annotated[
    dict[str, Any],
    AfterValidator(_check_structured),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "json": _SCHEMA,
                "regex": {"type": "string"},
                "choice": {"type": "array", "items": {"type": "string"}},
                "grammar": {"type": "string"},
                "json_object": {"type": "boolean"},
                "structural_tag": {"anyOf": [{"type": "object"}, {"type": "string"}]},
            },
        }
    ),
]


class OpenAiGrammarFields(GrammarFields):
    """The grammars of OpenAI's routes."""

    response_format: ResponseFormat | None = optional(
        "text, json_object, or json_schema. A schema is always enforced completely, with and without `strict`."
    )
    structured_outputs: StructuredOutputs | None = optional("vLLM's spelling: one of its fields.")

    def grammars(self) -> list[NamedGrammar]:
        return [*super().grammars(), *self._response_format(), *self._structured_outputs()]

    def _response_format(self) -> list[NamedGrammar]:
        given = self.response_format or {"type": "text"}
        match given["type"]:
            case "json_object":
                return [("response_format", Grammar("json_schema", _ANY_OBJECT))]
            case "json_schema":
                text = _encoded(given["json_schema"]["schema"])
                return [("response_format.json_schema.schema", Grammar("json_schema", text))]
            case "structural_tag":
                return [("response_format", Grammar("structural_tag", _encoded(given)))]
        return []

    def _structured_outputs(self) -> list[NamedGrammar]:
        found: list[NamedGrammar] = []
        for name, value in (self.structured_outputs or {}).items():
            if value is None or value is False or name in _IGNORED_OPTIONS:
                continue
            kind, text = _STRUCTURED_KINDS[name], _ANY_OBJECT if name == "json_object" else _encoded(value)
            found.append((f"structured_outputs.{name}", Grammar(kind, text)))
        return found
