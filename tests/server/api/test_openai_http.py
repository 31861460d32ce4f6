"""/v1/completions and /v1/chat/completions over a real socket, in the formats that OpenAI's clients expect."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import decoders

from pdserve.common.sampling import SamplingParams
from pdserve.models.loading.catalog import locate_model
from pdserve.scheduler.messages.frontend import Cancel, Failed, FinishReason, Submit, Tokens
from pdserve.server.text.tokenizer import Tokenizer, load_tokenizer
from tests.server.http_harness import (
    CHAT_TEMPLATE,
    RunningServer,
    running_server,
    sse_events,
    write_byte_model,
)
from tests.server.scripted_leader import EOS, make_finished

WHITESPACE = "structured_outputs.whitespace_pattern"
HELLO = [{"role": "user", "content": "Hello"}]


def post(server: RunningServer, path: str, **body: object) -> "asyncio.Task[httpx.Response]":
    return asyncio.create_task(server.http.post(path, json=body))


async def test_completion(decode: RunningServer) -> None:
    asking = post(decode, "/v1/completions", model="bytes", prompt=["ab", "cd"], max_tokens=3, rid="c", temperature=0)
    first, second = await decode.leader.expect(Submit), await decode.leader.expect(Submit)
    assert (first.prompt_ids, second.prompt_ids) == (tuple(b"ab"), tuple(b"cd"))
    assert (first.sampling.max_new_tokens, first.sampling.temperature) == (3, 0.0)
    await decode.leader.send(Tokens("c_1", (66,)), make_finished("c_1", 1))
    await decode.leader.send(Tokens("c_0", (65, EOS)), make_finished("c_0", 2, FinishReason("stop", matched=EOS)))
    body = (await asking).json()
    assert (body["id"], body["object"], body["model"]) == ("cmpl-c", "text_completion", "bytes")
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in body["choices"]] == [
        (0, "A", "stop"),
        (1, "B", "length"),
    ]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (10, 3, 13)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6}


async def test_completion_stream_sends_deltas(decode: RunningServer) -> None:
    options = {"include_usage": True}
    asking = post(decode, "/v1/completions", prompt=[97, 98], rid="c", stream=True, stream_options=options)
    assert (await decode.leader.expect(Submit)).prompt_ids == (97, 98)
    await decode.leader.send(Tokens("c", (65,)))
    await decode.report()
    await decode.leader.send(Tokens("c", (66,)), make_finished("c", 2))
    events: list[Any] = sse_events((await asking).text)
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 7)
    assert "".join(event["choices"][0]["text"] for event in events) == "AB"
    assert all(event["usage"] is None for event in events)
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"


async def test_continuation_keeps_its_first_space(tmp_path: Path) -> None:
    """Decoders of Llama 2 and Mistral strip the first space of a text. Answers are stripped, continuations are not."""
    path = str(write_byte_model(tmp_path) / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(path)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    backend.save(path)
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    async with running_server(load_tokenizer(locate_model(str(tmp_path)))) as server:

        async def answer(path: str, **body: object) -> Any:
            asking = post(server, path, rid="c", **body)
            await server.leader.expect(Submit)
            await server.leader.send(Tokens("c", tuple(b" Al")), make_finished("c", 3))
            return (await asking).json()

        assert (await answer("/generate", text="I am"))["text"] == " Al"
        (choice,) = (await answer("/v1/completions", prompt="I am", echo=True))["choices"]
        assert choice["text"] == "I am Al"
        (choice,) = (await answer("/v1/chat/completions", messages=HELLO))["choices"]
        assert choice["message"]["content"] == "Al"
        (choice,) = (await answer("/v1/chat/completions", messages=begun, continue_final_message=True))["choices"]
        assert choice["message"]["content"] == " Al"


async def test_roles_in_any_case_and_integral_floats_are_accepted(decode: RunningServer) -> None:
    messages = [{"role": "Developer", "content": "Be brief."}, {"role": "tool", "content": "4"}]
    asking = post(decode, "/v1/chat/completions", messages=messages, rid="c", max_tokens=1.0, lora_path="")
    submit = await decode.leader.expect(Submit)
    assert bytes(submit.prompt_ids).decode() == "system: Be brief.\ntool: 4\nassistant: "
    assert submit.sampling.max_new_tokens == 1
    await decode.leader.send(make_finished("c", 0))
    assert (await asking).status_code == 200


async def test_chat(decode: RunningServer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]},
    ]
    asking = post(decode, "/v1/chat/completions", messages=messages, rid="c", max_completion_tokens=9, max_tokens=5)
    submit = await decode.leader.expect(Submit)
    assert bytes(submit.prompt_ids).decode() == "system: Be brief.\nuser: Hello\nassistant: "
    assert submit.sampling.max_new_tokens == 9
    await decode.leader.send(Tokens("c", tuple(b"Hi")), make_finished("c", 2, FinishReason("stop", matched=EOS)))
    body = (await asking).json()
    assert (body["id"], body["object"]) == ("chatcmpl-c", "chat.completion")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hi"}
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_chat_stream(decode: RunningServer) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    asking = post(decode, "/v1/chat/completions", messages=messages, rid="c", stream=True, stop="!")
    assert (await decode.leader.expect(Submit)).sampling.max_new_tokens == 400 - len("user: Hello\nassistant: ")
    await decode.leader.send(Tokens("c", tuple(b"Hi")))
    await decode.report()
    await decode.leader.send(Tokens("c", tuple(b" you! more")))
    assert await decode.leader.expect(Cancel) == Cancel("c", stopped=True)
    await decode.leader.send(make_finished("c", 12, FinishReason("stop")))
    events: list[Any] = sse_events((await asking).text)
    assert events.pop() == "[DONE]"
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hi you"
    assert (deltas[-1], events[-1]["choices"][0]["finish_reason"]) == ({}, "stop")
    assert all("usage" not in event for event in events)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("rid", "shown"), [("mine", "mine"), ("naïve 🦀", None)])
async def test_response_header_has_the_rid_if_it_is_ascii(
    decode: RunningServer, rid: str, shown: str | None, stream: bool
) -> None:
    for failed in (False, True):
        asking = post(decode, "/v1/completions", prompt="a", rid=rid, stream=stream)
        await decode.leader.expect(Submit)
        await decode.leader.send(Failed(rid, 503, "unavailable", "no") if failed else make_finished(rid, 0))
        response = await asking
        assert (response.status_code, response.headers.get("x-request-id")) == (503 if failed else 200, shown)


@pytest.mark.parametrize("name", ["no_stop_trim", "include_stop_str_in_output"])
async def test_stop_string_is_shown_on_request(decode: RunningServer, name: str) -> None:
    """The field has one name in SGLang and another in vLLM."""
    asking = post(decode, "/v1/completions", prompt="a", rid="c", stop="!", **{name: True})
    await decode.leader.expect(Submit)
    await decode.leader.send(Tokens("c", tuple(b"Hi! more")))
    assert await decode.leader.expect(Cancel) == Cancel("c", stopped=True)
    await decode.leader.send(make_finished("c", 8, FinishReason("stop")))
    assert (await asking).json()["choices"][0]["text"] == "Hi!"


async def test_given_values_reach_the_leader(decode: RunningServer) -> None:
    params = {"top_k": 4, "min_p": 0.5, "repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": -1}
    more = {
        "logit_bias": {"5": 1},
        "seed": 3,
        "min_tokens": 2,
        "max_completion_tokens": 4,
        "priority": 5,
        "timeout_s": 2,
    }
    asking = post(decode, "/v1/chat/completions", messages=HELLO, rid="c", temperature=0.5, top_p=0.9, **params, **more)
    submit = await decode.leader.expect(Submit)
    assert submit.sampling == SamplingParams(
        max_new_tokens=4,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        seed=3,
        min_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        logit_bias=((5, 1.0),),
        min_new_tokens=2,
    )
    assert (submit.priority, submit.timeout_s, submit.logprobs) == (5, 2.0, None)
    await decode.leader.send(make_finished("c", 0))
    assert (await asking).status_code == 200


async def test_fields_of_other_servers_are_ignored(decode: RunningServer) -> None:
    asking = post(decode, "/v1/completions", prompt="a", rid="c", max_input_tokens=5, cache_salt="x")
    await decode.leader.expect(Submit)
    await decode.leader.send(make_finished("c", 0))
    assert (await asking).status_code == 200


async def test_failure_mid_stream_is_an_error_event(decode: RunningServer) -> None:
    asking = post(decode, "/v1/completions", prompt="a", rid="c", stream=True)
    await decode.leader.expect(Submit)
    await decode.leader.send(Tokens("c", (65,)))
    await decode.report()
    await decode.leader.send(Failed("c", 503, "unavailable", "prefill lost"))
    events: list[Any] = sse_events((await asking).text)
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["message"] == "prefill lost"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [1, 999]}, "prompt[1]"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "a", "n": 17}, "n"),
        ("completions", {"prompt": "a", "best_of": 2}, "best_of"),
        ("completions", {"prompt": "a", "best_of": 3, "n": 2}, "best_of"),
        ("completions", {"prompt": "a", "logprobs": 21}, "logprobs"),
        ("completions", {"prompt": "a", "logprobs": True}, "logprobs"),
        ("completions", {"prompt": "a", "presence_penalty": 2.1}, "presence_penalty"),
        ("completions", {"prompt": "a", "frequency_penalty": -2.1}, "frequency_penalty"),
        ("completions", {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
        ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ("completions", {"prompt": "a", "min_p": 2}, "min_p"),
        ("completions", {"prompt": "a", "max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ("completions", {"prompt": "a", "stop": ["x"] * 17}, "stop"),
        ("completions", {"prompt": "a", "priority": 1000}, "priority"),
        ("completions", {"prompt": "a", "timeout": 0}, "timeout"),
        ("completions", {"prompt": "a", "echo": 1}, "echo"),
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("completions", {"prompt": "a", "stream_options": 1}, "stream_options"),
        ("completions", {"prompt": "a", "temprature": 0}, "temprature"),
        ("completions", {"prompt": "a", "max_new_tokens": 5}, "max_new_tokens"),
        ("completions", {"prompt": "a", "sampling_params": {}}, "sampling_params"),
        ("completions", {"prompt": "a", "guided_json": {}}, "guided_json"),
        ("completions", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": None}, "messages"),
        ("chat/completions", {"message": HELLO}, "message"),
        ("chat/completions", {"messages": [1]}, "messages[0]"),
        ("chat/completions", {"messages": [{"content": "a"}]}, "messages[0].role"),
        ("chat/completions", {"messages": [{"role": "banana", "content": "a"}]}, "messages[0].role"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        ("chat/completions", {"messages": HELLO, "echo": True}, "echo"),
        ("chat/completions", {"messages": HELLO, "web_search_options": {}}, "web_search_options"),
        ("chat/completions", {"messages": HELLO, "top_a": 0.2}, "top_a"),
        ("completions", {"prompt": "a", "tools": [{}]}, "tools"),
        ("completions", {"prompt": "a", "tool_choice": "required"}, "tool_choice"),
        ("chat/completions", {"messages": HELLO, "tools": [{}]}, "tools[0].type"),
        ("chat/completions", {"messages": HELLO, "functions": [{}]}, "functions"),
        ("chat/completions", {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        ("chat/completions", {"messages": HELLO, "chat_template": "x"}, "chat_template"),
        ("chat/completions", {"messages": HELLO, "chat_template_kwargs": 1}, "chat_template_kwargs"),
        ("chat/completions", {"messages": HELLO, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools"),
        ("chat/completions", {"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
        ("chat/completions", {"messages": HELLO, "add_generation_prompt": 0}, "add_generation_prompt"),
        (
            "chat/completions",
            {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "messages[1].tool_calls[0].function",
        ),
        ("chat/completions", {"messages": HELLO, "logprobs": 1}, "logprobs"),
        ("chat/completions", {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
        ("chat/completions", {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type"),
        ("chat/completions", {"messages": HELLO, "response_format": "json_object"}, "response_format"),
        (
            "chat/completions",
            {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        ("completions", {"prompt": "a", "structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ("completions", {"prompt": "a", "structured_outputs": {"whitespace_pattern": " "}}, WHITESPACE),
        ("completions", {"prompt": "a", "regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 500}]}, "messages"),
    ],
)
async def test_error_names_the_invalid_field(
    decode: RunningServer, path: str, body: dict[str, object], field: str
) -> None:
    response = await decode.http.post(f"/v1/{path}", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"response_format": {"type": "xml"}}, 'must be text, json_object, json_schema or structural_tag, got "xml"'),
        ({"tool_choice": "required"}, 'tool_choice is "required", but there are no tools'),
        ({"tool_choice": "any"}, 'tool_choice must be "none", "auto" or "required", got "any"'),
        ({"max_new_tokens": 5}, "max_new_tokens is for /generate; here it is max_tokens"),
        (
            {"max_tokens": 999},
            "between 1 and 400, got 999; this model's maximum context length is 400 tokens on this server",
        ),
        ({"guided_json": {}}, "guided_json is now structured_outputs.json"),
        ({"stop_tokens_ids": [1]}, "stop_tokens_ids is not a field of this request: did you mean stop_token_ids?"),
    ],
)
async def test_error_message_names_the_accepted_values(
    decode: RunningServer, body: dict[str, object], message: str
) -> None:
    response = await decode.http.post("/v1/chat/completions", json={"messages": HELLO, **body})
    assert message in response.json()["error"]["message"]


async def prompt_of(server: RunningServer, path: str = "/v1/chat/completions", **body: object) -> str:
    asking = post(server, path, **body)
    submit = await server.leader.expect(Submit)
    await server.leader.send(make_finished(submit.rid, 0))
    assert (await asking).status_code == 200
    return bytes(submit.prompt_ids).decode()


async def test_harmless_fields_of_other_servers_are_accepted(decode: RunningServer) -> None:
    """Fields that OpenAI's, SGLang's and vLLM's clients and routers send, with values that change nothing."""
    body: dict[str, Any] = {
        "model": "gpt-4o",
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "reasoning_effort": "low",
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "separate_reasoning": True,
        "stream_reasoning": True,
        "return_hidden_states": False,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "add_special_tokens": False,
        "include_stop_str_in_output": False,
        "best_of": 1,
        "prediction": {"type": "content", "content": "x"},
        "return_token_ids": False,
        "cache_salt": "s",
        "seed": -1,
        "top_a": 0.0,
        "encoder_repetition_penalty": 1.0,
        "repeat_penalty": 1.0,
        "temperature_last": True,
        "reasoning_format": "auto",
    }
    assert await prompt_of(decode, messages=HELLO, **body) == "user: Hello\nassistant: "


def tokenizer_with(template: str, directory: Path) -> Tokenizer:
    directory.mkdir(exist_ok=True)
    model = write_byte_model(directory)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return load_tokenizer(locate_model(str(model)))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "reasoning_effort": "low"}),
        ("/v1/responses", {"input": "Hello", "reasoning": {"effort": "low", "summary": "auto"}}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9, "output_config": {"effort": "low"}}),
    ],
)
async def test_reasoning_effort_reaches_the_template(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    template = "effort {{ reasoning_effort | default('medium') }}\n" + CHAT_TEMPLATE
    async with running_server(tokenizer_with(template, tmp_path)) as server:
        assert await prompt_of(server, path, **body) == "effort low\nuser: Hello\nassistant: "
        kwargs = {"chat_template_kwargs": {"reasoning_effort": "high"}}
        assert await prompt_of(server, path, **body, **kwargs) == "effort high\nuser: Hello\nassistant: "


async def test_count_tokens_includes_the_reasoning_effort(tmp_path: Path) -> None:
    body = {"messages": HELLO, "output_config": {"effort": "low"}}
    async with running_server(tokenizer_with("{{ reasoning_effort }}\n" + CHAT_TEMPLATE, tmp_path)) as server:
        counting = await post(server, "/v1/messages/count_tokens", **body)
        prompt = await prompt_of(server, "/v1/messages", **body, max_tokens=9)
    assert prompt == "low\nuser: Hello\nassistant: "
    assert counting.json()["input_tokens"] == len(prompt)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "seed": -1, "reasoning_effort": "low"}),
        ("/v1/responses", {"input": "a", "seed": -1}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9, "seed": -1}),
    ],
)
async def test_random_seed_and_effort_without_a_template_are_accepted(
    decode: RunningServer, path: str, body: dict[str, Any]
) -> None:
    assert await prompt_of(decode, path, **body)


async def test_developer_is_system_unless_the_template_has_it(tmp_path: Path) -> None:
    """Qwen's templates write nothing for roles that they do not know."""
    messages = [{"role": "developer", "content": "Be brief."}, *HELLO]
    known = "{{% for m in messages if m.role in [{}] %}}{{{{ m.role }}}}: {{{{ m.content }}}}\n{{% endfor %}}"
    for roles, first in (("'system', 'user'", "system"), ("'developer', 'system', 'user'", "developer")):
        async with running_server(tokenizer_with(known.format(roles), tmp_path / first)) as server:
            assert await prompt_of(server, messages=messages) == f"{first}: Be brief.\nuser: Hello\n"


async def test_chat_template_fields_change_the_prompt(tmp_path: Path) -> None:
    template = "{% if enable_thinking is defined %}thinking {{ enable_thinking }}\n{% endif %}" + CHAT_TEMPLATE
    async with running_server(tokenizer_with(template, tmp_path)) as server:
        assert await prompt_of(server, messages=HELLO) == "user: Hello\nassistant: "
        off: Any = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}}
        assert await prompt_of(server, **off) == "thinking False\nuser: Hello\nassistant: "
        assert await prompt_of(server, messages=HELLO, reasoning_effort="none") == await prompt_of(server, **off)
        assert await prompt_of(server, messages=HELLO, add_generation_prompt=False) == "user: Hello\n"
        begun = [*HELLO, {"role": "assistant", "content": "Well,"}]
        assert await prompt_of(server, messages=begun) == "user: Hello\nassistant: Well,\nassistant: "
        continued = await prompt_of(server, messages=begun, continue_final_message=True, add_generation_prompt=False)
        assert continued == "user: Hello\nassistant: Well,"
