"""OpenAI's client calls /v1/responses: whole responses, streams, tools, reasoning, structured output and errors."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import TypeAdapter

from pdserve.scheduler.messages.frontend import Cancel, Failed, FinishReason, Submit, Tokens
from pdserve.server.api.responses.models import ResponseEvent, ResponseObject
from tests.server.http_harness import RunningServer
from tests.server.scripted_leader import EOS, make_finished

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
STOPPED = FinishReason("stop", matched=EOS)


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1",
        api_key="right",
        max_retries=0,
        timeout=10,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    ) as made:
        yield made


async def generate(server: RunningServer, text: str, reason: FinishReason = STOPPED) -> str:
    """Answer the next request with this text, a character at a time; returns its prompt."""
    submit = await server.leader.expect(Submit)
    for byte in text.encode():
        await server.leader.send(Tokens(submit.rid, (byte,)))
    await server.leader.send(make_finished(submit.rid, len(text), reason))
    return bytes(submit.prompt_ids).decode()


async def test_text(server: RunningServer, client: openai.AsyncOpenAI) -> None:
    asking = asyncio.create_task(
        client.responses.create(
            model="any", instructions="Be brief.", input="Hello", max_output_tokens=5, temperature=0.5, store=True
        )
    )
    assert await generate(server, "Hi") == "system: Be brief.\nuser: Hello\nassistant: "
    response = await asking
    assert (response.output_text, response.status, response.object) == ("Hi", "completed", "response")
    assert response.store is False, "nothing is stored"
    assert (response.instructions, response.max_output_tokens, response.temperature) == ("Be brief.", 5, 0.5)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (5, 2, 7)
    assert response.usage.input_tokens_details.cached_tokens == 3


async def test_output_that_reaches_its_limit_is_incomplete(server: RunningServer, client: openai.AsyncOpenAI) -> None:
    asking = asyncio.create_task(client.responses.create(model="any", input="Hello", max_output_tokens=2))
    await generate(server, "Hi", FinishReason("length", length=2))
    response = await asking
    assert response.incomplete_details is not None
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"


async def test_items_of_a_conversation_become_messages(server: RunningServer, client: openai.AsyncOpenAI) -> None:
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "user", "content": "And?"},
    ]
    asking = asyncio.create_task(client.responses.create(model="any", input=items, tools=[WEATHER]))
    assert await generate(server, "Sunny.") == (
        "tools: get_weather\nsystem: Be brief.\nuser: Weather?\n"
        'assistant: I look<tool_call>get_weather {"city": "Rome"} c1</tool_call> ~hm~\n'
        "tool: sunny (c1)\nuser: And?\nassistant: "
    )
    assert (await asking).output_text == "Sunny."


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_text_and_calls_are_items(
    server: RunningServer, client: openai.AsyncOpenAI, stream: bool
) -> None:
    wanted: Any = {
        "model": "any",
        "input": "Weather in Rome?",
        "tools": [WEATHER],
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }

    async def ask() -> Any:
        if not stream:
            return await client.responses.create(**wanted)
        async with client.responses.stream(**wanted) as events:  # checks the order of events and assembles them
            return await events.get_final_response()

    asking = asyncio.create_task(ask())
    assert (await generate(server, f"hm\n</think>\n\nI look. {CALL}")).endswith("assistant: <think>\n")
    response = await asking
    reasoning, message, call = response.output
    assert (reasoning.type, reasoning.content[0].text.strip()) == ("reasoning", "hm")
    assert (message.type, message.content[0].text.strip()) == ("message", "I look.")
    assert (call.type, call.name, call.arguments) == ("function_call", "get_weather", '{"city": "Rome"}')
    assert call.call_id.startswith("call_")
    assert response.status == "completed"
    assert response.usage.output_tokens_details.reasoning_tokens > 0


async def test_events_of_a_stream_come_in_order(server: RunningServer, client: openai.AsyncOpenAI) -> None:
    asking = asyncio.create_task(client.responses.create(model="any", input="Hello", stream=True))
    generating = asyncio.create_task(generate(server, "Hi"))
    events = [event async for event in await asking]
    await generating
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == "Hi"


async def test_replies_validate_against_their_models(server: RunningServer) -> None:
    for stream in (False, True):
        body = {"input": "a", "stream": stream, "tools": [WEATHER], "metadata": {"a": "b"}}
        headers = {"Authorization": "Bearer right"}
        asking = asyncio.create_task(server.http.post("/v1/responses", json=body, headers=headers))
        await generate(server, f"Hi {CALL}")
        answer = await asking
        if not stream:
            assert TypeAdapter(ResponseObject).validate_python(answer.json()) == answer.json()
            continue
        assert "[DONE]" not in answer.text
        for block in answer.text.strip().split("\n\n"):
            name, data = block.split("\n")
            event = TypeAdapter(ResponseEvent).validate_json(data.removeprefix("data: "))
            assert event == json.loads(data.removeprefix("data: ")), "a field is not declared"
            assert name == f"event: {event['type']}"


async def test_deeply_nested_settings_are_repeated(server: RunningServer) -> None:
    nested: list[Any] = []
    for _ in range(300):
        nested = [nested]
    tool = {**WEATHER, "parameters": {"enum": nested}}
    body = json.dumps({"input": "a", "metadata": {"a": nested}, "tools": [tool]})
    asking = asyncio.create_task(
        server.http.post("/v1/responses", content=body, headers={"Authorization": "Bearer right"})
    )
    await generate(server, "Hi")
    answer = await asking
    assert answer.status_code == 200
    assert answer.json()["metadata"] == {"a": nested}
    assert answer.json()["tools"] == [tool]


async def test_failure_is_the_last_event_and_an_abort_ends_the_response(
    server: RunningServer, client: openai.AsyncOpenAI
) -> None:
    for failed, name, status in (
        (Failed("r", 503, "unavailable", "prefill lost"), "response.failed", "failed"),
        (Failed("r", 499, "aborted", "aborted"), "response.incomplete", "cancelled"),
    ):
        asking = asyncio.create_task(
            client.responses.create(model="any", input="Hello", stream=True, extra_body={"rid": "r"})
        )
        await server.leader.expect(Submit)
        await server.leader.send(Tokens("r", (65,)))
        await server.report()
        await server.leader.send(failed)
        events: list[Any] = [event async for event in await asking]
        assert (events[-1].type, events[-1].response.status) == (name, status)
        error = events[-1].response.error
        assert (None if error is None else error.message) == ("prefill lost" if status == "failed" else None)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"previous_response_id": "resp_1"}, 'previous_response_id is not supported here (got "resp_1")'),
        ({"background": True}, "background is not supported here (got true); only false is accepted"),
        ({"tools": [{"type": "web_search"}]}, 'tools[0].type must be "function", got "web_search"'),
        ({"tools": [{**WEATHER, "type": "mcp"}]}, 'tools[0].type must be "function", got "mcp"'),
        ({"stop": ["a"]}, "stop is not supported here (got an array of 1); only [] is accepted"),
        ({"n": 2}, "n is not supported here (got 2); only 1 is accepted"),
        ({"regex": "a"}, 'regex is not supported here (got "a")'),
        ({"messages": []}, "messages is for /v1/chat/completions; here it is input"),
        ({"input": []}, "input is required and must not be empty"),
        ({"input": 3}, "input must be a string or an array of items, got 3"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type must be one of message, function_call, "),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type must be"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role must be"),
        ({"max_output_tokens": 100_000}, "max_output_tokens must be between 1 and 400, got 100000"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema is required with json_schema"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice names a function that is not in tools"),
        ({"tools": [WEATHER, WEATHER]}, 'tools[1].name is given twice: "get_weather"'),
        ({"input": [{"type": "reasoning"}]}, "input is required and must not be empty"),
        ({"input": "a" * 500}, "input has 518 tokens; this model's maximum context length is"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(
    server: RunningServer, body: dict[str, object], problem: str
) -> None:
    headers = {"Authorization": "Bearer right"}
    answer = await server.http.post("/v1/responses", json={"input": "a", **body}, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(problem)


async def test_closing_a_stream_aborts_its_request(server: RunningServer, client: openai.AsyncOpenAI) -> None:
    asking = asyncio.create_task(client.responses.create(model="any", input="Hello", stream=True))
    submit = await server.leader.expect(Submit)
    await server.leader.send(Tokens(submit.rid, (65,)))
    stream = await asking
    await stream.close()
    assert await server.leader.expect(Cancel) == Cancel(submit.rid)
    await server.leader.send(Failed(submit.rid, 499, "aborted", "gone"))
