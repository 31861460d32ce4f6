"""Builds the grammar of a chat from `tool_choice`, strict functions, `response_format` and the other grammar fields.

The grammar applies after the reasoning of the model.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from ....common.sampling import MAX_GRAMMAR_CHARACTERS, Grammar, ReasoningTags
from ....models.grammar.json_text import parse_json
from ...text.chat_format import ChatFormat
from ...text.parsers.call_grammars import FunctionSchema, UnwritableCallsError
from ...text.unfinished_json import MOST_CHARACTERS, ends_inside_json
from ..common.fields import FieldError
from ..common.grammar_fields import NamedGrammar
from .models import ChatBody
from .tool_models import NamedChoice, ToolDefinition


def chat_grammar(
    fields: ChatBody, tools: Sequence[ToolDefinition], chat: ChatFormat, prompt: str, begun: str
) -> NamedGrammar | None:
    """Returns the grammar of the output, if there is one, with the name of its field; raises FieldError. `prompt` and
    `begun` are those of `ReasoningStyle.is_open`.
    """
    try:
        found = _with_calls(fields, tools, chat)
    except UnwritableCallsError as error:
        raise FieldError("tools", str(error)) from None
    style = chat.reasoning
    if style is None or not style.is_open(prompt, begun):
        _check_begun(begun, fields, tools, chat)
    if found is None or style is None or style.is_closed(prompt):
        return found
    tags = ReasoningTags(style.open, style.close, style.is_open(prompt, begun))
    return found[0], msgspec.structs.replace(found[1], after=tags)


def _check_begun(begun: str, fields: ChatBody, tools: Sequence[ToolDefinition], chat: ChatFormat) -> None:
    """Raises FieldError if the text that the client has begun contains a tool call, or ends inside JSON although a
    schema is given: calls are parsed, and grammars applied, only from the beginning of the output.
    """
    if tools and chat.family is not None and any(tag in begun for tag in chat.family.parser.tags):
        raise FieldError("continue_final_message", "cannot continue a message that calls tools")
    given = fields.grammar()
    if given is not None and given[1].kind == "json_schema":
        answer = begun.rpartition(chat.reasoning.close)[2] if chat.reasoning is not None else begun
        if len(answer) > MOST_CHARACTERS:
            raise FieldError(
                "continue_final_message",
                f"cannot continue {len(answer)} characters with a schema; at most {MOST_CHARACTERS} are allowed",
            )
        if ends_inside_json(answer):
            raise FieldError(
                "continue_final_message", "cannot continue JSON that has begun: its schema is for the output"
            )


def _with_calls(fields: ChatBody, tools: Sequence[ToolDefinition], chat: ChatFormat) -> NamedGrammar | None:
    given, choice, parallel = fields.grammar(), fields.tool_choice, fields.parallel_tool_calls is not False
    if not tools or chat.family is None:
        return given
    tags = chat.family.tags
    functions = [
        FunctionSchema(tool.function.name, tool.function.parameters or {}, bool(tool.function.strict)) for tool in tools
    ]
    if choice == "required" or isinstance(choice, NamedChoice):
        if given is not None and given[0].partition(".")[0] != "response_format":
            raise FieldError(given[0], "cannot be combined with a tool_choice that requires a call")
        if isinstance(choice, NamedChoice):
            functions = [function for function in functions if function.name == choice.function.name]
            parallel = False
        return "tools", _structural_tag(tags.calls(functions, parallel=parallel))
    if given is not None:
        alternatives = [tags.calls(functions, parallel=parallel), _as_format(*given)]
        return given[0], _structural_tag({"type": "or", "elements": alternatives})
    if any(function.strict for function in functions):
        return "tools", _structural_tag(tags.text_with_calls(functions))
    return None


def _as_format(name: str, grammar: Grammar) -> dict[str, Any]:
    """Converts the grammar of an answer without a call to a part of a structural tag. Raises FieldError."""
    match grammar.kind:
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "choice":
            return {
                "type": "or",
                "elements": [{"type": "const_string", "value": text} for text in _parsed(name, grammar)],
            }
        case "json_schema":
            return {"type": "json_schema", "json_schema": _parsed(name, grammar)}
    raise FieldError(name, "cannot be combined with tools, unless tool_choice is none")


def _parsed(name: str, grammar: Grammar) -> Any:
    if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
        raise FieldError(name, f"has {len(grammar.text)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed")
    try:
        return parse_json(grammar.text)
    except ValueError as error:
        raise FieldError(name, str(error)) from None


def _structural_tag(content: dict[str, Any]) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": content}))
