"""The grammar of a chat: from tool_choice, strict functions and response_format, with reasoning before it."""

import json
from typing import Any

import pytest

from pdserve.common.sampling import Grammar, ReasoningTags
from pdserve.server.api.common.fields import FieldError
from pdserve.server.api.openai.chat_grammars import chat_grammar
from pdserve.server.api.openai.models import ChatBody
from pdserve.server.text.chat_format import ChatFormat
from pdserve.server.text.parsers.families import FAMILIES
from pdserve.server.text.parsers.reasoning import THINK

PLAIN = ChatFormat(FAMILIES["hermes"])
THINKING = ChatFormat(FAMILIES["hermes"], THINK)
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object"}, "strict": True},
}
NAMED = {"type": "function", "function": {"name": "add"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}


def grammar_of(
    chat: ChatFormat = PLAIN, prompt: str = "assistant:", begun: str = "", **body: Any
) -> tuple[str, Grammar] | None:
    fields = ChatBody.model_validate({"messages": [{"role": "user", "content": "Hi"}], **body})
    return chat_grammar(fields, fields.offered_tools(), chat, prompt + begun, begun)


def format_of(**body: Any) -> Any:
    found = grammar_of(**body)
    assert found is not None
    assert found[1].kind == "structural_tag"
    return json.loads(found[1].text)["format"]


def listed(calls: dict[str, Any]) -> Any:
    """The part of a grammar of calls that lists them. After it, the closing tag is optional."""
    return calls["elements"][0]


def names(tags: list[dict[str, Any]]) -> list[str]:
    return [json.loads(tag["begin"].removeprefix("<tool_call>\n") + "0}")["name"] for tag in tags]


def test_chat_without_required_calls_or_a_format_has_no_grammar() -> None:
    assert grammar_of(tools=[NOW]) is None
    assert grammar_of(tools=[NOW], tool_choice="auto") is None
    assert grammar_of(tools=[ADD], tool_choice="none") is None


def test_functions_without_a_grammar_are_refused_where_calls_are_required() -> None:
    parameters = {"type": "object", "properties": {f"a{at}": {"type": "integer"} for at in range(5000)}}
    large = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(FieldError, match="tools make a grammar of more than 131072 characters"):
        grammar_of(tools=[large], tool_choice="required")
    assert grammar_of(tools=[large]) is None


def test_required_and_named_calls() -> None:
    required = listed(format_of(tools=[NOW, ADD], tool_choice="required"))
    assert (names(required["tags"]), required["stop_after_first"]) == (["now", "add"], False)
    assert [tag["content"]["lenient"] for tag in required["tags"]] == [True, False]
    one = listed(format_of(tools=[NOW, ADD], tool_choice="required", parallel_tool_calls=False))
    assert one["stop_after_first"]
    named = listed(format_of(tools=[NOW, ADD], tool_choice=NAMED, response_format=SCHEMA))
    assert (names(named["tags"]), named["stop_after_first"]) == (["add"], True)


def test_strict_functions() -> None:
    found = format_of(tools=[NOW, ADD])
    assert (found["type"], found["triggers"], names(found["tags"])) == (
        "triggered_tags",
        ["<tool_call>"],
        ["now", "add"],
    )


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ({"response_format": SCHEMA}, {"type": "json_schema", "json_schema": {"type": "integer"}}),
        ({"regex": "[0-9]"}, {"type": "regex", "pattern": "[0-9]"}),
        (
            {"structured_outputs": {"choice": ["a"]}},
            {"type": "or", "elements": [{"type": "const_string", "value": "a"}]},
        ),
    ],
)
def test_output_is_a_call_or_matches_the_format(body: dict[str, Any], answer: dict[str, Any]) -> None:
    found = format_of(tools=[NOW], **body)
    calls, other = found["elements"]
    assert (found["type"], names(listed(calls)["tags"]), other) == ("or", ["now"], answer)


def test_grammars_that_cannot_be_combined_are_refused() -> None:
    with pytest.raises(FieldError, match="ebnf cannot be combined with tools"):
        grammar_of(tools=[NOW], ebnf="root ::= a")
    with pytest.raises(FieldError, match="regex cannot be combined with a tool_choice that requires a call"):
        grammar_of(tools=[NOW], tool_choice="required", regex="a")


def test_reasoning_before_a_grammar() -> None:
    def after(prompt: str, **body: Any) -> ReasoningTags | None:
        found = grammar_of(THINKING, prompt, **body)
        assert found is not None
        return found[1].after

    assert after("assistant: <think>\n", response_format=SCHEMA) == ReasoningTags("<think>", "</think>", True)
    assert after("assistant: ", regex="a") == ReasoningTags("<think>", "</think>", False)
    assert after("assistant: <think>\n\n</think>\n\n", response_format=SCHEMA) is None
    assert after("assistant: <think>", tools=[NOW], tool_choice="required") == ReasoningTags(
        "<think>", "</think>", True
    )
    assert grammar_of(THINKING, "assistant: <think>") is None


@pytest.mark.parametrize(
    ("begun", "body", "problem"),
    [
        ('{"a": ', {"response_format": SCHEMA}, "cannot continue JSON that has begun"),
        ("Here:\n```json\n[1, ", {"json_schema": "{}"}, "cannot continue JSON that has begun"),
        ("<think>{}</think>{", {"response_format": SCHEMA}, "cannot continue JSON that has begun"),
        ('text } and {"a": 1', {"response_format": SCHEMA}, "cannot continue JSON that has begun"),
        ("x" * 65_537, {"response_format": SCHEMA}, "cannot continue 65537 characters with a schema; at most 65536"),
        ("x" * 65_536, {"response_format": SCHEMA}, None),
        ('The format is "{" then.', {"response_format": SCHEMA}, None),
        ('I had {"a": 1}. Now', {"response_format": SCHEMA}, None),
        ("Here:\n```json\n", {"response_format": SCHEMA}, None),
        ("<think>So {", {"response_format": SCHEMA}, None),
        ('{"a": ', {"regex": "[0-9]+}"}, None),
        ('<tool_call>\n{"name": "now"', {"tools": [NOW]}, "cannot continue a message that calls tools"),
        ('<tool_call>\n{"name": "now"', {}, None),
        ("<think>Is it <tool_call>", {"tools": [NOW]}, None),
        ("Let me look.", {"tools": [NOW], "tool_choice": "required"}, None),
        ("Run this:\n```sh\n", {"tools": [NOW]}, None),
    ],
)
def test_json_and_calls_that_have_begun_are_not_continued(
    begun: str, body: dict[str, Any], problem: str | None
) -> None:
    """Grammars and parsers of calls see only the output, not the message that it continues."""
    for name in ("hermes", "hermes-lenient"):
        chat = ChatFormat(FAMILIES[name], THINK)
        if problem is None:
            grammar_of(chat, begun=begun, **body)
        else:
            with pytest.raises(FieldError, match=f"^continue_final_message {problem}"):
                grammar_of(chat, begun=begun, **body)
