"""Anthropic's client calls /v1/messages: whole messages, streams, tools, thinking, token counts and errors."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import TypeAdapter

from pdserve.scheduler.messages.frontend import Cancel, Failed, FinishReason, Submit, Tokens
from pdserve.server.api.anthropic.models import MessageEvent, MessageReply, MessagesBody
from tests.optional_libraries import needs
from tests.server.http_harness import RunningServer
from tests.server.scripted_leader import EOS, make_finished

if TYPE_CHECKING:  # the import takes 2 s of CPU time; only the worker that runs this file pays for it
    import anthropic

pytestmark = needs("anthropic")

WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
STOPPED = FinishReason("stop", matched=EOS)
KEY = {"x-api-key": "right"}
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def client(server: RunningServer) -> "AsyncIterator[anthropic.AsyncAnthropic]":
    async with client_of(server, "right") as made:
        yield made


def client_of(server: RunningServer, api_key: str) -> "anthropic.AsyncAnthropic":
    import anthropic

    return anthropic.AsyncAnthropic(
        base_url=f"http://127.0.0.1:{server.port}",
        api_key=api_key,
        max_retries=0,
        timeout=10,
        http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False),
    )


async def generate(server: RunningServer, text: str, reason: FinishReason = STOPPED) -> str:
    """Answer the next request with this text, a character at a time; returns its prompt."""
    submit = await server.leader.expect(Submit)
    for byte in text.encode():
        await server.leader.send(Tokens(submit.rid, (byte,)))
    await server.leader.send(make_finished(submit.rid, len(text), reason))
    return bytes(submit.prompt_ids).decode()


@pytest.mark.parametrize(
    ("reason", "stop_reason"), [(STOPPED, "end_turn"), (FinishReason("length", length=2), "max_tokens")]
)
async def test_text(
    server: RunningServer, client: "anthropic.AsyncAnthropic", reason: FinishReason, stop_reason: str
) -> None:
    asking = asyncio.create_task(client.messages.create(model="any", system="Be brief.", messages=HELLO, max_tokens=5))
    assert await generate(server, "Hi", reason) == "system: Be brief.\nuser: Hello\nassistant: "
    message = await asking
    assert (message.role, message.content[0].text, message.stop_reason) == ("assistant", "Hi", stop_reason)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (2, 3, 2)


async def test_stop_sequence(server: RunningServer, client: "anthropic.AsyncAnthropic") -> None:
    asking = asyncio.create_task(
        client.messages.create(model="any", messages=HELLO, max_tokens=5, stop_sequences=["\n", "END"])
    )
    submit = await server.leader.expect(Submit)
    await server.leader.send(Tokens(submit.rid, tuple(b"a END")))
    assert await server.leader.expect(Cancel) == Cancel(submit.rid, stopped=True)
    await server.leader.send(make_finished(submit.rid, 5, FinishReason("stop")))
    message = await asking
    assert message.content[0].text == "a "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


async def test_blocks_of_a_conversation_become_messages(
    server: RunningServer, client: "anthropic.AsyncAnthropic"
) -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look"},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    expected = (
        "tools: get_weather\nuser: Weather?\n"
        'assistant: I look<tool_call>get_weather {"city": "Rome"} t1</tool_call> ~hm~\n'
        "tool: sunny (t1)\nuser: And?\nassistant: "
    )
    asking = asyncio.create_task(client.messages.create(model="any", messages=messages, max_tokens=5, tools=[WEATHER]))
    assert await generate(server, "Sunny") == expected
    assert (await asking).content[0].text == "Sunny"
    counted = await client.messages.count_tokens(model="any", messages=messages, tools=[WEATHER])
    assert counted.input_tokens == len(expected)


def test_no_field_of_anthropic_counts_as_misspelt() -> None:
    from anthropic.types.message_create_params import MessageCreateParamsBase

    known = MessagesBody.model_fields.keys() | MessagesBody.unsupported.keys()
    others = MessageCreateParamsBase.__annotations__.keys() - known
    given = {"messages": HELLO, "max_tokens": 5, "speed": "fast", **dict.fromkeys(others, "x")}
    assert MessagesBody.model_validate(given).seed is None


async def test_context_management_of_claude_code_is_ignored(server: RunningServer) -> None:
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    body = {"messages": HELLO, "max_tokens": 5, "context_management": edits}
    counting = await server.http.post("/v1/messages/count_tokens", json=body, headers=KEY)
    assert counting.status_code == 200
    asking = asyncio.create_task(server.http.post("/v1/messages?beta=true", json=body, headers=KEY))
    submit = await server.leader.expect(Submit)
    assert len(submit.prompt_ids) == counting.json()["input_tokens"]
    await server.leader.send(make_finished(submit.rid, 0))
    assert (await asking).status_code == 200


@pytest.mark.parametrize(
    ("kind", "end"), [("enabled", "<think>\n"), ("adaptive", "<think>\n"), ("disabled", "</think>")]
)
async def test_thinking_sets_the_variables_of_all_templates(server: RunningServer, kind: str, end: str) -> None:
    body = {"messages": HELLO, "max_tokens": 5, "thinking": {"type": kind}}
    asking = asyncio.create_task(server.http.post("/v1/messages", json=body, headers=KEY))
    assert await generate(server, "Hi") == f"user: Hello\nassistant: {end}"
    assert (await asking).status_code == 200


async def test_last_message_of_the_assistant_is_continued(
    server: RunningServer, client: "anthropic.AsyncAnthropic"
) -> None:
    begun: Any = [*HELLO, {"role": "assistant", "content": "{"}]
    asking = asyncio.create_task(client.messages.create(model="any", messages=begun, max_tokens=5))
    assert await generate(server, "}") == "user: Hello\nassistant: {"
    assert (await asking).content[0].text == "}"


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_text_and_calls_are_blocks(
    server: RunningServer, client: "anthropic.AsyncAnthropic", stream: bool
) -> None:
    wanted: Any = {
        "model": "any",
        "messages": HELLO,
        "max_tokens": 200,
        "tools": [WEATHER],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }

    async def ask() -> Any:
        if not stream:
            return await client.messages.create(**wanted)
        async with client.messages.stream(**wanted) as events:  # checks the order of events and assembles them
            return await events.get_final_message()

    asking = asyncio.create_task(ask())
    assert (await generate(server, f"hm\n</think>\n\nI look. {CALL}")).endswith("assistant: <think>\n")
    message = await asking
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking.strip()) == ("thinking", "hm")
    assert (text.type, text.text.strip()) == ("text", "I look.")
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Rome"})
    assert message.stop_reason == "tool_use"
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_blocks_have_the_order_of_the_output(
    server: RunningServer, client: "anthropic.AsyncAnthropic", stream: bool
) -> None:
    wanted: Any = {"model": "any", "messages": HELLO, "max_tokens": 200, "tools": [WEATHER]}

    async def ask() -> Any:
        if not stream:
            return await client.messages.create(**wanted)
        async with client.messages.stream(**wanted) as events:
            return await events.get_final_message()

    asking = asyncio.create_task(ask())
    await generate(server, f"I look. {CALL} Done.")
    content = (await asking).content
    assert [block.type for block in content] == ["text", "tool_use", "text"]
    assert content[2].text == "Done."


async def test_events_of_a_stream_come_in_order(server: RunningServer, client: "anthropic.AsyncAnthropic") -> None:
    asking = asyncio.create_task(client.messages.create(model="any", messages=HELLO, max_tokens=5, stream=True))
    generating = asyncio.create_task(generate(server, "Hi"))
    names = [event.type async for event in await asking]
    await generating
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_replies_validate_against_their_models(server: RunningServer) -> None:
    for stream in (False, True):
        body = {"messages": HELLO, "max_tokens": 99, "stream": stream, "tools": [WEATHER]}
        asking = asyncio.create_task(server.http.post("/v1/messages", json=body, headers=KEY))
        await generate(server, f"Hi {CALL}")
        answer = await asking
        if not stream:
            assert TypeAdapter(MessageReply).validate_python(answer.json()) == answer.json()
            continue
        assert "[DONE]" not in answer.text
        for block in answer.text.strip().split("\n\n"):
            name, data = block.split("\n")
            event = TypeAdapter(MessageEvent).validate_json(data.removeprefix("data: "))
            assert event == json.loads(data.removeprefix("data: ")), "a field is not declared"
            assert name == f"event: {event['type']}"


async def test_failure_and_abort_in_a_stream(server: RunningServer) -> None:
    for failed, last in (
        (Failed("r", 503, "unavailable", "prefill lost"), '"type":"overloaded_error","message":"prefill lost"'),
        (Failed("r", 499, "aborted", "aborted"), '{"type":"message_stop"}'),
    ):
        body = {"messages": HELLO, "max_tokens": 9, "stream": True, "rid": "r"}
        asking = asyncio.create_task(server.http.post("/v1/messages", json=body, headers=KEY))
        await server.leader.expect(Submit)
        await server.leader.send(Tokens("r", (65,)))
        await server.report()
        await server.leader.send(failed)
        text = (await asking).text
        assert last in text.strip().split("\n\n")[-1]
        assert ('"stop_reason":"abort"' in text) == (failed.status == 499)


async def test_errors_have_the_shape_that_the_client_expects(
    server: RunningServer, client: "anthropic.AsyncAnthropic"
) -> None:
    import anthropic

    async with client_of(server, "wrong") as stranger:
        with pytest.raises(anthropic.AuthenticationError, match="wrong API key") as refused:
            await stranger.messages.create(model="any", messages=HELLO, max_tokens=5)
    assert refused.value.body == {
        "type": "error",
        "error": {
            "type": "authentication_error",
            "message": "wrong API key: it is not the api_key of this server",
        },
    }
    asking = asyncio.create_task(client.messages.create(model="any", messages=HELLO, max_tokens=5))
    submit = await server.leader.expect(Submit)
    await server.leader.send(Failed(submit.rid, 429, "overloaded", "queue holds 256 requests", retry_after_s=2.5))
    with pytest.raises(anthropic.RateLimitError, match="queue holds 256 requests") as overloaded:
        await asking
    assert overloaded.value.response.headers["retry-after"] == "3"
    with pytest.raises(anthropic.NotFoundError, match="Not Found"):
        await client.post("/v1/messages/batches", cast_to=object)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"max_tokens": None}, "max_tokens must be an integer, got null"),
        ({"max_tokens": 100_000}, "max_tokens must be between 1 and 400, got 100000"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 'messages[0].role must be "user", "assistant" or "system"'),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type must be one of",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is required"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 'tools[0].type must be "custom"'),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is required with tool"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported here"),
        ({"presence_penalty": 1}, "presence_penalty is not supported here (got 1); only 0 is accepted"),
        ({"response_format": {"type": "json_object"}}, "response_format is for /v1/chat/completions; here it is"),
        ({"stop": ["a"]}, "stop is for OpenAI's routes; here it is stop_sequences"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format must be"),
        ({"tools": [{"name": "f", "input_schema": {}}] * 2}, 'tools[1].name is given twice: "f"'),
        (
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
                ]
            },
            "messages cannot continue a message that calls tools",
        ),
    ],
)
async def test_unsupported_fields_are_refused_by_name(
    server: RunningServer, body: dict[str, object], problem: str
) -> None:
    answer = await server.http.post("/v1/messages", json={"messages": HELLO, "max_tokens": 5, **body}, headers=KEY)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json()["error"]["message"].startswith(problem)
