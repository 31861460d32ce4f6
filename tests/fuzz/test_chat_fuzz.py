"""Damaged chat bodies of all APIs: parsing one works or raises ClientError, never another exception."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import ClientError
from pdserve.common.sampling import NEUTRAL_SAMPLING
from pdserve.configs.schema import DecodeConfig
from pdserve.server.api.anthropic.requests import parse_message
from pdserve.server.api.common.limits import Limits
from pdserve.server.api.openai.chat_requests import parse_chat
from pdserve.server.api.responses.requests import parse_response
from pdserve.server.text.chat_format import ChatFormat
from pdserve.server.text.tokenizer import Tokenizer
from tests.fuzz.harness import altered, as_json, damaged, fuzz, kept
from tests.server.http_harness import load_byte_tokenizer
from tests.server.scripted_leader import make_ready

LIMITS = dataclasses.replace(
    Limits.of(DecodeConfig(), make_ready(), NEUTRAL_SAMPLING), max_total_tokens=4000, max_prompt_tokens=3000
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "x"}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
    "logit_bias": {"5": -1.5},
    "stop": ["a", "b"],
    "max_tokens": 5,
    "n": 2,
    "logprobs": True,
    "top_logprobs": 2,
}
RESPONSE = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
    "max_output_tokens": 5,
}
MESSAGE = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "be brief"}],
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"city": "x"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "rain"}]},
    ],
    "tools": [{"name": "f", "input_schema": PARAMETERS}],
    "stop_sequences": ["a"],
}
Parse = Callable[[bytes, Limits, Tokenizer, ChatFormat], object]
DIALECTS: dict[str, tuple[Parse, dict[str, Any]]] = {
    "chat": (parse_chat, CHAT),
    "responses": (parse_response, RESPONSE),
    "messages": (parse_message, MESSAGE),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_chat_is_parsed_or_refused(dialect: str, tokenizer: Tokenizer) -> None:
    parse, valid = DIALECTS[dialect]
    chat = ChatFormat.of(tokenizer, "hermes", "none")

    def check(body: bytes) -> None:
        with contextlib.suppress(ClientError):
            parse(body, LIMITS, tokenizer, chat)

    parse(as_json(valid), LIMITS, tokenizer, chat)
    for body in kept(dialect):
        check(body)
    fuzz(altered(valid).map(as_json) | damaged(as_json(valid)), check)


def test_corpus_has_only_known_checks() -> None:
    known = {*DIALECTS, "checkpoint", "rank_messages", "peer_messages", "templates", "worst"}
    assert {path.name for path in (Path(__file__).parent / "corpus").iterdir()} <= known
