"""Options of the JSON of grammars: white space by SGLang's settings, and vLLM's options of a request."""

import json
from typing import Any

import pytest

from pdserve.common.sampling import NEUTRAL_SAMPLING, Grammar
from pdserve.configs.schema import DecodeConfig
from pdserve.server.api.common.limits import Limits
from pdserve.server.api.generate.requests import parse_generate
from pdserve.server.api.openai.chat_requests import parse_chat
from pdserve.server.text.chat_format import ChatFormat
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.scripted_leader import make_ready

TOOL = {"type": "function", "function": {"name": "now"}}


def grammar_of(tokenizer: Tokenizer, config: DecodeConfig, body: dict[str, Any]) -> Grammar:
    limits, encoded = Limits.of(config, make_ready(), NEUTRAL_SAMPLING), json.dumps(body).encode()
    if "text" in body:
        ((_, grammar),) = parse_generate(encoded, limits, tokenizer).grammars
    else:
        ((_, grammar),) = parse_chat(encoded, limits, tokenizer, ChatFormat.of(tokenizer, "hermes", "none")).grammars
    return grammar


def whitespace(tokenizer: Tokenizer, config: DecodeConfig, body: dict[str, Any]) -> str | None:
    return grammar_of(tokenizer, config, body).json_whitespace


@pytest.mark.parametrize(
    "body",
    [
        {"text": "a", "sampling_params": {"json_schema": {}}},
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "response_format": {"type": "json_object"}},
    ],
    ids=["generate", "json_object", "tools", "tools_or_json"],
)
def test_server_sets_the_whitespace_of_grammars(tools_tokenizer: Tokenizer, body: dict[str, Any]) -> None:
    asked = body if "text" in body else {"messages": [{"role": "user", "content": "Hi"}], **body}
    pattern, disabled = (
        DecodeConfig(constrained_json_whitespace_pattern=r"\s*"),
        DecodeConfig(constrained_json_disable_any_whitespace=True),
    )
    assert [whitespace(tools_tokenizer, config, asked) for config in (DecodeConfig(), pattern, disabled)] == [
        None,
        r"\s*",
        "",
    ]
    if "text" not in body:  # vLLM's options are on OpenAI's routes
        asked["structured_outputs"] = {"disable_any_whitespace": True}
        assert whitespace(tools_tokenizer, pattern, asked) == ""
        asked["structured_outputs"] = {"disable_any_whitespace": False}
        assert whitespace(tools_tokenizer, pattern, asked) == r"\s*"


@pytest.mark.parametrize("disabled", [True, False])
def test_request_disables_additional_properties(tools_tokenizer: Tokenizer, disabled: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "structured_outputs": {"json": {}, "disable_additional_properties": disabled},
    }
    assert grammar_of(tools_tokenizer, DecodeConfig(), body).closes_patterns is disabled


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"constrained_json_whitespace_pattern": " ", "constrained_json_disable_any_whitespace": True},
            "give one of them",
        ),
        ({"constrained_json_whitespace_pattern": "[ "}, "constrained_json_whitespace_pattern is not a regular"),
    ],
    ids=["both", "invalid"],
)
def test_whitespace_settings_that_cannot_hold_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodeConfig(**settings)
