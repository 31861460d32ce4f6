"""Structured output in the formats of /v1/responses and /v1/messages, and these routes on a prefill server."""

import json
from typing import Any

import pytest

from pdserve.common.sampling import NEUTRAL_SAMPLING, Grammar
from pdserve.configs.schema import DecodeConfig, PrefillConfig
from pdserve.server.api.anthropic.requests import parse_message
from pdserve.server.api.common.calls import Call
from pdserve.server.api.common.limits import Limits
from pdserve.server.api.openai.models import ChatBody
from pdserve.server.api.responses.requests import parse_response
from pdserve.server.text.chat_format import ChatFormat
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.http_harness import running_server
from tests.server.scripted_leader import make_ready

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ENFORCED = Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":")))


def parse(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> Call[ChatBody]:
    limits = Limits.of(DecodeConfig(), make_ready(), NEUTRAL_SAMPLING)
    encoded, chat = json.dumps(body).encode(), ChatFormat.of(tokenizer, "none", "none")
    if path == "/v1/messages":
        return parse_message(encoded, limits, tokenizer, chat)
    return parse_response(encoded, limits, tokenizer, chat)[0]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
            "text.format",
        ),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "a"}],
                "max_tokens": 9,
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            },
            "output_config.format",
        ),
    ],
)
def test_schema_becomes_a_grammar(tools_tokenizer: Tokenizer, path: str, body: dict[str, Any], field: str) -> None:
    call = parse(tools_tokenizer, path, body)
    assert call.grammars == ((field, ENFORCED),)
    assert call.submits[0].sampling.grammar == ENFORCED


async def test_prefill_server_responds_without_the_engine(tools_tokenizer: Tokenizer) -> None:
    async with running_server(tools_tokenizer, PrefillConfig()) as prefill:
        for path, body in (
            ("/v1/responses", {"input": "a"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
        ):
            for stream in (False, True):
                answer = await prefill.http.post(path, json={**body, "bootstrap_room": 1, "stream": stream})
                assert (answer.status_code, "[DONE]" in answer.text) == (200, False)
            refused = await prefill.http.post(path, json=body)
            assert (refused.status_code, "bootstrap_room is required" in refused.text) == (400, True)
