"""Translates grammars of requests to the language of llguidance, and refuses those that would be too expensive.

A JSON schema is enforced completely or refused: the output never violates a keyword of an accepted schema.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from ...common.errors import ClientError
from ...common.sampling import MAX_GRAMMAR_CHARACTERS, Grammar
from .closed_objects import close_objects
from .json_text import parse_json
from .regex_size import regex_size
from .string_formats import with_exact_formats
from .structural_tags import reasoning_to_lark, structural_tag_to_lark

MAX_REGEX_SIZE = 10_000
"""Characters of a regular expression with all repetitions written out. llguidance limits the work of a mask, but very
large repetitions exceed its limits by seconds."""
MAX_MULTIPLE_OF = 10_000
"""Of integers: the automaton that divides has as many states."""

WITH_SCHEMAS = {"json_schema", "structural_tag"}
"""Kinds of grammars that may have JSON schemas."""
JSON_WHITESPACE = r"\x20"
"""What may stand between two JSON tokens, besides nothing. If more were allowed, small models would fill every gap with
it until `max_new_tokens`."""


class GrammarError(ClientError):
    """The grammar is invalid, not supported or too expensive. The message does not name the field of the request."""


def to_llguidance(grammar: Grammar, special_tokens: Mapping[str, int], *, closes_objects: bool = True) -> str:
    """The grammar as llguidance takes it; raises GrammarError. `special_tokens` maps texts to ids. If not
    `closes_objects`, schemas are taken as they are.
    """
    made = _answer_to_llguidance(grammar, special_tokens, closes_objects)
    if grammar.after is None:
        return made
    parsed = json.loads(made) if made.startswith("{") else {"grammars": [{"lark_grammar": made}]}
    answer = {**parsed["grammars"][0], "name": "answer"}
    start = {"lark_grammar": reasoning_to_lark(grammar.after, special_tokens)}
    return json.dumps({**parsed, "grammars": [start, answer, *parsed["grammars"][1:]]})


def _answer_to_llguidance(grammar: Grammar, special_tokens: Mapping[str, int], closes_objects: bool) -> str:
    """The same without the reasoning before it."""
    text = grammar.text
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarError(f"has {len(text)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed")
    try:
        match grammar.kind:
            case "json_schema":
                overrides = cast("llguidance._lib.JsonCompileOptions", _json_options(grammar))
                schema = _made_exact(_parsed(text), grammar, closes_objects)
                return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)
            case "regex":
                return llguidance.LLMatcher.grammar_from_regex(check_regex(text))
            case "ebnf":
                return _from_ebnf(text, grammar)
            case "choice":
                return _from_choices(_parsed(text))
            case "structural_tag":
                inline_schema = partial(_inline_schema, grammar, closes_objects)
                return structural_tag_to_lark(_parsed(text), special_tokens, inline_schema, check_regex)
    except RecursionError:
        raise GrammarError("is nested too deeply") from None
    except KeyError as error:
        raise GrammarError(f"is not a valid {grammar.kind}: {error.args[0]} is missing") from None
    except (ValueError, TypeError) as error:
        raise GrammarError(f"is not a valid {grammar.kind}: {error}") from None


def check_schema(schema: object) -> dict[str, Any]:
    """The schema, if its regular expressions and divisors are small enough; raises GrammarError. The schema true, which
    allows every value, becomes an object: llguidance takes options only with an object.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"must be a JSON schema: an object or a boolean, not {json.dumps(schema)[:80]}")
    if schema is False:
        raise GrammarError("is the schema false, which allows no value")
    if schema is True:
        return {}
    for node in _objects(schema):
        named = node.get("patternProperties")
        for pattern in (node.get("pattern"), *(named if isinstance(named, dict) else ())):
            if isinstance(pattern, str):
                check_regex(pattern)
        divisor = node.get("multipleOf")
        if isinstance(divisor, int) and not isinstance(divisor, bool) and divisor > MAX_MULTIPLE_OF:
            raise GrammarError(f"has multipleOf {divisor}; at most {MAX_MULTIPLE_OF} is allowed")
    return schema


def check_regex(pattern: str) -> str:
    """The pattern, if it is small enough with all repetitions written out; raises GrammarError."""
    size = regex_size(pattern)
    if size > MAX_REGEX_SIZE:
        raise GrammarError(
            f"has a regular expression of {size} characters with its repetitions written out; at most {MAX_REGEX_SIZE} "
            "are allowed"
        )
    return pattern


def _from_choices(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("must be a list of at least one string")
    return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))


def _from_ebnf(text: str, grammar: Grammar) -> str:
    try:
        return llguidance.LLMatcher.grammar_from_lark(_with_options(any_to_lark(text), grammar))
    except Exception as error:  # the converter raises whatever it meets in a malformed grammar
        raise GrammarError(f"is not a valid EBNF grammar: {error}") from None


_LARK_PART = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?![/*])(?:[^/\\\n]|\\.)+/|//[^\n]*|%json\s*(?=\{)')
"""A string, an expression, a comment, or the word before a JSON schema."""


def _with_options(lark: str, grammar: Grammar) -> str:
    """A Lark grammar whose JSON schemas are checked, and have our options unless they set them themselves."""
    parts, at = [], 0
    while (found := _LARK_PART.search(lark, at)) is not None:
        parts.append(lark[at : found.end()])
        at = found.end()
        if found[0].startswith("%json"):
            schema, at = json.JSONDecoder().raw_decode(lark, at)
            options = {**_json_options(grammar), **schema.get("x-guidance", {})}
            parts.append(json.dumps({**check_schema(schema), "x-guidance": options}))
    return "".join((*parts, lark[at:]))


def _json_options(grammar: Grammar) -> dict[str, Any]:
    """llguidance's options for the JSON of a grammar."""
    given = grammar.json_whitespace
    return {"whitespace_pattern": JSON_WHITESPACE if given is None else given}


def _made_exact(schema: object, grammar: Grammar, closes_objects: bool) -> dict[str, Any]:
    """A copy of the schema with exact formats and closed objects; raises GrammarError."""
    made: dict[str, Any] = with_exact_formats(check_schema(schema))
    if closes_objects:
        close_objects(made, with_patterns=grammar.closes_patterns)
    return made


def _inline_schema(grammar: Grammar, closes_objects: bool, schema: object, lenient: bool) -> str:
    """A JSON schema as a part of a Lark grammar. It carries its options itself. `lenient`: what cannot be enforced is
    ignored.
    """
    options = {"x-guidance": {**_json_options(grammar), "lenient": lenient}}
    return "%json " + json.dumps({**_made_exact(schema, grammar, closes_objects), **options})


def _parsed(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise GrammarError(str(error)) from None


def _objects(value: object) -> Iterator[dict[str, Any]]:
    """All JSON objects in a value, the value included."""
    pending = [value]
    while pending:
        current = pending.pop()
        if isinstance(current, dict):
            yield current
            pending += current.values()
        elif isinstance(current, list):
            pending += current
