"""Fields that constrain the output by a grammar: SGLang's, OpenAI's `response_format`, vLLM's `structured_outputs`."""

from typing import Annotated, Any, Literal, NotRequired

import msgspec
from pydantic import BeforeValidator, ConfigDict, PlainValidator, with_config
from typing_extensions import TypedDict

from ....common.sampling import Grammar
from ....common.words import shortened, shown
from .fields import Body, Boolean, FieldError, FirstError, Text, optional, problem

GrammarKind = Literal["json_schema", "regex", "ebnf", "choice", "structural_tag"]

_OWN_KINDS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf", "structural_tag")
_STRUCTURED_KINDS: dict[str, GrammarKind] = {
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
    """Returns a JSON value as text, and text unchanged: clients send a schema as an object or as its JSON text."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _schema_text(value: object) -> str:
    if not isinstance(value, dict | bool | str):
        raise problem(f"must be a JSON schema, as an object or as text, got {shown(value)}")
    return _encoded(value)


def _tag_text(value: object) -> str:
    if not isinstance(value, dict | str):
        raise problem(f"must be a structural tag, as an object or as text, got {shown(value)}")
    return _encoded(value)


SchemaText = Annotated[str, PlainValidator(_schema_text, json_schema_input_type=dict[str, Any] | bool | str)]
TagText = Annotated[str, PlainValidator(_tag_text, json_schema_input_type=dict[str, Any] | str)]


class GrammarFields(Body):
    """At most one grammar for a request."""

    json_schema: SchemaText | None = optional("The output is JSON that matches this schema; an object, or its text.")
    regex: Text | None = optional("The whole output matches this regular expression (Rust syntax).")
    ebnf: Text | None = optional("The output matches this grammar: GBNF with a rule `root`, or Lark.")
    structural_tag: TagText | None = optional("SGLang's structural tag: text in which triggers begin structured parts.")

    def grammars(self) -> list[NamedGrammar]:
        given = [(kind, getattr(self, kind)) for kind in _OWN_KINDS]
        return [(kind, Grammar(kind, text)) for kind, text in given if text is not None]

    def grammar(self, path: str = "") -> NamedGrammar | None:
        """Returns the grammar of the output, if any, and the name of its field with `path` before it. Raises FieldError
        if there are several grammars.
        """
        found = self.grammars()
        if len(found) > 1:
            names = ", ".join(path + name for name, _ in found)
            raise FieldError(path + found[1][0], f"cannot be combined with another grammar: {names} were given")
        return (path + found[0][0], found[0][1]) if found else None

    def json_whitespace(self) -> str | None:
        """Returns what the request says about white space, for `Grammar.json_whitespace`."""
        return None

    def closes_patterns(self) -> bool:
        """Returns `Grammar.closes_patterns`."""
        return False


def _check_format(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise problem(f"must be an object, got {shown(value)}")
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


def _known_and_given(value: object) -> object:
    """Leaves nulls out. Stops at the first unknown name: pydantic would make an error for each of 100,000."""
    if not isinstance(value, dict):
        return value
    given = {name: item for name, item in value.items() if item is not None}
    for name in given:
        if name not in StructuredFields.__annotations__:
            raise problem("is not supported by this server", shortened(name))
    return given


@with_config(ConfigDict(extra="forbid"))
class StructuredFields(TypedDict, total=False):
    """One grammar, and options of its JSON. `disable_fallback` is ignored: there is no other backend."""

    json: SchemaText
    json_object: Boolean
    regex: Text
    choice: Annotated[list[Text], FirstError()]
    grammar: Text
    structural_tag: TagText
    disable_fallback: Any
    disable_any_whitespace: Boolean
    disable_additional_properties: Boolean


class JsonSchemaFields(TypedDict):
    name: NotRequired[str]
    description: NotRequired[str]
    schema: dict[str, Any]
    strict: NotRequired[bool]


class FormatFields(TypedDict):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NotRequired[JsonSchemaFields]


ResponseFormat = Annotated[dict[str, Any], PlainValidator(_check_format, json_schema_input_type=FormatFields)]
StructuredOutputs = Annotated[StructuredFields, BeforeValidator(_known_and_given)]


class OpenAiGrammarFields(GrammarFields):
    """The grammars of OpenAI's routes."""

    response_format: ResponseFormat | None = optional(
        "text, json_object, or json_schema. A schema is always enforced completely, with and without `strict`."
    )
    structured_outputs: StructuredOutputs | None = optional("vLLM's object of grammars: give one of its fields.")

    def grammars(self) -> list[NamedGrammar]:
        return [*super().grammars(), *self._response_format(), *self._structured_outputs()]

    def json_whitespace(self) -> str | None:
        return "" if (self.structured_outputs or {}).get("disable_any_whitespace") else None

    def closes_patterns(self) -> bool:
        return (self.structured_outputs or {}).get("disable_additional_properties", False)

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
            if value is not False and (kind := _STRUCTURED_KINDS.get(name)) is not None:
                text = _ANY_OBJECT if name == "json_object" else _encoded(value)
                found.append((f"structured_outputs.{name}", Grammar(kind, text)))
        return found
