"""Tools and reasoning of /v1/chat/completions over a real socket: prompts, whole replies, stream deltas."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.common.sampling import TokenLogprob
from pdserve.configs.schema import DecodeConfig
from pdserve.models.loading.catalog import locate_model
from pdserve.scheduler.messages.frontend import FinishReason, Submit, Tokens
from pdserve.server.text.tokenizer import Tokenizer, load_tokenizer
from tests.server.http_harness import RunningServer, running_server, sse_events, write_byte_model
from tests.server.scripted_leader import EOS, make_finished

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
ASK = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function.name + ' ' + call.function.arguments }}"
    " {{ call.function.arguments | tojson }} {{ call.id }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %} ({{ m.tool_call_id }} {{ m.name }}){% endif %}"
    "{% if m.reasoning_content %} ~{{ m.reasoning_content }}~{% endif %}{{ '\n' }}{% endfor %}"
    "assistant: {% if enable_thinking %}<think>\n{% endif %}"
)
"""A template with calls in Hermes format. With `enable_thinking`, the prompt opens reasoning."""


def byte_tokenizer(directory: Path, template: str) -> Tokenizer:
    write_byte_model(directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return load_tokenizer(locate_model(str(directory)))


@pytest.fixture(scope="module")
def tools_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tools"), TEMPLATE)


@pytest.fixture
async def server(tools_tokenizer: Tokenizer) -> AsyncIterator[RunningServer]:
    async with running_server(tools_tokenizer) as running:
        yield running


def post(server: RunningServer, **body: object) -> "asyncio.Task[httpx.Response]":
    return asyncio.create_task(server.http.post("/v1/chat/completions", json={"messages": ASK, **body}))


async def answer(server: RunningServer, text: str, **body: object) -> tuple[str, Any]:
    """Send a chat and generate `text`, one token per message. Returns the prompt, and the reply or stream events."""
    asking = post(server, **body)
    submit = await server.leader.expect(Submit)
    for token in text.encode():
        await server.leader.send(Tokens(submit.rid, (token,)))
    count = len(text.encode())
    await server.leader.send(make_finished(submit.rid, count, FinishReason("stop", matched=EOS)))
    response = await asking
    assert response.status_code == 200, response.text
    prompt = bytes(submit.prompt_ids).decode()
    return prompt, sse_events(response.text) if body.get("stream") else response.json()


def deltas_of(events: Any) -> list[dict[str, Any]]:
    return [event["choices"][0]["delta"] for event in events[:-1] if event["choices"]]


async def test_calls_of_a_whole_reply(server: RunningServer) -> None:
    prompt, reply = await answer(server, f"I look.\n{CALL}\n{CALL}", tools=[WEATHER, NOW])
    assert prompt.startswith(f"tools: {json.dumps([WEATHER, NOW])}\nuser: Hi\n")
    choice = reply["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "get_weather", "arguments": '{"city": "Rome"}'}] * 2
    assert {call["type"] for call in calls} == {"function"}
    assert len({call["id"] for call in calls}) == 2


async def test_lenient_parser_reads_calls_in_code_blocks(tools_tokenizer: Tokenizer) -> None:
    """Qwen2.5-Coder-1.5B writes calls in this way. Without the option they are content."""
    call = '```json\n{\n  "name": "get_weather",\n  "arguments": {\n    "city": "Rome"\n  }\n}\n```'
    other = '```json\n{"name": "Anna", "arguments": {}}\n```'
    async with running_server(tools_tokenizer, DecodeConfig(tool_parser="hermes-lenient")) as server:
        _, reply = await answer(server, f"I look.\n{call}", tools=[WEATHER])
        choice = reply["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
        (whole,) = choice["message"]["tool_calls"]
        assert json.loads(whole["function"]["arguments"]) == {"city": "Rome"}
        _, events = await answer(server, f"I look.\n{call}", tools=[WEATHER], stream=True)
        deltas = deltas_of(events)
        assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
        streamed = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
        assert streamed[0]["name"] == "get_weather"
        assert "".join(part["arguments"] for part in streamed) == whole["function"]["arguments"]
        for stream in (False, True):
            _, reply = await answer(server, other, tools=[WEATHER], stream=stream)
            if stream:
                assert "".join(delta.get("content") or "" for delta in deltas_of(reply)) == other
            else:
                assert reply["choices"][0]["message"] == {"role": "assistant", "content": other}
    async with running_server(tools_tokenizer) as server:
        _, reply = await answer(server, call, tools=[WEATHER])
        assert reply["choices"][0]["message"] == {"role": "assistant", "content": call}


async def test_content_is_null_only_beside_calls(server: RunningServer) -> None:
    _, reply = await answer(server, CALL, tools=[WEATHER])
    assert reply["choices"][0]["message"]["content"] is None
    _, reply = await answer(server, "", tools=[WEATHER])
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": ""}


async def test_stream_deltas_of_a_call(server: RunningServer) -> None:
    asking = asyncio.create_task(collect(server, tools=[WEATHER], stream=True))
    submit = await server.leader.expect(Submit)
    for piece in (f"I look.\n{CALL[:50]}", CALL[50:58], CALL[58:]):
        await server.leader.send(Tokens(submit.rid, tuple(piece.encode())))
        await server.report()
    await server.leader.send(make_finished(submit.rid, 80, FinishReason("stop", matched=EOS)))
    events = await asking
    assert events[-1] == "[DONE]"
    deltas = deltas_of(events)
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    (first, *others) = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert first.pop("id").startswith("call_")
    assert first == {"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    assert others == [{"index": 0, "function": {"arguments": text}} for text in ("{", '"city": ', '"Rome"}')], (
        "the arguments arrive piece by piece"
    )
    assert (deltas[-1], events[-2]["choices"][0]["finish_reason"]) == ({}, "tool_calls")


async def test_content_without_a_call_is_not_delayed(server: RunningServer) -> None:
    asking = asyncio.create_task(collect(server, tools=[WEATHER], stream=True))
    submit = await server.leader.expect(Submit)
    await server.leader.send(Tokens(submit.rid, tuple(b"Hello")))
    await server.report()
    await server.leader.send(Tokens(submit.rid, tuple(b" <tool")), make_finished(submit.rid, 11))
    contents = [delta["content"] for delta in deltas_of(await asking) if delta.get("content")]
    assert contents == ["Hello", " <tool"]


async def collect(server: RunningServer, **body: object) -> list[Any]:
    response = await server.http.post("/v1/chat/completions", json={"messages": ASK, **body})
    return sse_events(response.text)


async def test_output_is_content_without_tools_and_with_choice_none(server: RunningServer) -> None:
    for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        prompt, reply = await answer(server, f"I look.\n{CALL}\n", **body)
        assert prompt == "user: Hi\nassistant: "
        choice = reply["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": f"I look.\n{CALL}\n"}
        assert choice["finish_reason"] == "stop"


async def test_one_call_without_parallel_tool_calls(server: RunningServer) -> None:
    _, reply = await answer(server, f"{CALL}\n{CALL}", tools=[WEATHER], parallel_tool_calls=False)
    assert len(reply["choices"][0]["message"]["tool_calls"]) == 1


async def test_truncated_call_ends_with_length(server: RunningServer) -> None:
    asking = post(server, tools=[WEATHER])
    submit = await server.leader.expect(Submit)
    await server.leader.send(Tokens(submit.rid, tuple(CALL[:58].encode())), make_finished(submit.rid, 58))
    choice = (await asking).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": '


async def test_malformed_call_is_content(server: RunningServer) -> None:
    text = '<tool_call>\n{"function": "get_weather"}\n</tool_call>'
    _, reply = await answer(server, text, tools=[WEATHER])
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": text}


async def test_history_is_passed_to_the_template(server: RunningServer) -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Röme"}'}}
    broken = {"id": "c2", "function": {"name": "now", "arguments": "{"}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [called, broken], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "sunny"},
    ]
    prompt, _ = await answer(server, "Fine.", messages=messages)
    assert prompt == (
        'assistant: <tool_call>get_weather {"city": "Röme"} {"city": "Röme"} c1</tool_call>'
        '<tool_call>now { "{" c2</tool_call> ~hm~\n'
        "tool: sunny (c1 get_weather)\nassistant: "
    )


async def test_lone_surrogate_in_earlier_arguments_is_replaced(server: RunningServer) -> None:
    function = {"name": "f", "arguments": json.dumps({"emoji": "\ud83d\ude00", "half": "\ud83d"})}
    call = {"id": "c", "type": "function", "function": function}
    prompt, _ = await answer(server, "Hi", messages=[*ASK, {"role": "assistant", "tool_calls": [call]}])
    assert '{"emoji": "\N{GRINNING FACE}", "half": "\N{REPLACEMENT CHARACTER}"}' in prompt


async def test_reasoning_that_the_prompt_opens(server: RunningServer) -> None:
    body: dict[str, Any] = {"tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": True}}
    text = f"Rome?\n</think>\n\n{CALL}"
    prompt, reply = await answer(server, text, **body)
    assert prompt.endswith("assistant: <think>\n")
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Rome?", None)
    assert len(message["tool_calls"]) == 1
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("Rome?\n</think>")}
    _, events = await answer(server, text, **body, stream=True)
    deltas = deltas_of(events)
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Rome?"
    assert not any(delta.get("content") for delta in deltas)


async def test_reasoning_that_the_output_opens(server: RunningServer) -> None:
    text = "<think>\nHm.\n</think>\n\nYes."
    _, reply = await answer(server, text)
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    _, reply = await answer(server, text, include_reasoning=False)
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "Yes."}
    _, reply = await answer(server, text, separate_reasoning=False)
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0)


async def test_log_probabilities_are_complete_in_a_stream_with_calls(server: RunningServer) -> None:
    """Also log-probabilities of tokens whose text is in no delta."""
    asking = asyncio.create_task(collect(server, tools=[WEATHER], stream=True, logprobs=True))
    submit = await server.leader.expect(Submit)
    text = f"I look.\n{CALL}"
    for piece in ("I look.", "\n<", CALL[1:65], CALL[65:68], CALL[68:]):  # the fourth only ends the call
        await server.leader.send(Tokens(submit.rid, tuple(piece.encode()), tuple(map(logprob, piece.encode()))))
        await server.report()
    await server.leader.send(make_finished(submit.rid, len(text), FinishReason("stop", matched=EOS)))
    choices = [event["choices"][0] for event in (await asking)[:-1]]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert "".join(entry["token"] for entry in entries) == text


async def test_template_without_tools_gets_them_as_text(decode: RunningServer) -> None:
    """The system message describes the tools and asks for calls in Hermes format."""
    called = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    short = {"type": "function", "function": {"name": "now"}}
    response = await decode.http.post("/tokenize", json={"messages": messages, "tools": [short]})
    prompt = bytes(response.json()["tokens"]).decode()
    assert prompt.startswith("system: Be brief.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(short)}\n</tools>" in prompt
    response = await decode.http.post("/tokenize", json={"messages": messages})
    assert bytes(response.json()["tokens"]).decode() == f"system: Be brief.\n{prompt[prompt.index('user: Hi') :]}"
    assert prompt.endswith(
        'user: Hi\nassistant: <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        "user: <tool_response>\nnoon\n</tool_response>\nassistant: "
    )


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", 'must be "function"'),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "is required"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name", "is given twice"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "not in tools",
        ),
        ({"tools": [NOW], "tool_choice": {"type": "custom"}}, "tool_choice.type", 'must be "function"'),
        ({"tools": [NOW], "parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        (
            {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]},
            "messages[0].tool_calls",
            "are for messages of the assistant",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "is required",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "must be a string"),
    ],
)
async def test_invalid_tools_are_refused(server: RunningServer, body: dict[str, Any], param: str, message: str) -> None:
    response = await server.http.post("/v1/chat/completions", json={"messages": ASK, **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert message in response.json()["error"]["message"]


async def test_tools_are_refused_without_a_tool_parser(tmp_path: Path, tools_tokenizer: Tokenizer) -> None:
    unknown = byte_tokenizer(tmp_path, "{% if tools %}{{ tools }}{% endif %}{{ messages[0].content }}")
    none = DecodeConfig(tool_parser="none", reasoning_parser="none")
    for tokenizer, config in ((unknown, None), (tools_tokenizer, none)):
        async with running_server(tokenizer, config) as server:
            response = await server.http.post("/v1/chat/completions", json={"messages": ASK, "tools": [NOW]})
            assert response.status_code == 400
            assert "--tool-parser" in response.json()["error"]["message"]
            if config is not None:
                _, reply = await answer(server, "<think>a</think>b")
                assert reply["choices"][0]["message"]["content"] == "<think>a</think>b"
