"""How an output ends: matched stops, stop expressions and aborts; token ids, prompt logprobs and continuous usage."""

import asyncio
from typing import Any

import httpx
import pytest

from pdserve.common.sampling import LogprobParams, TokenLogprob, pack_logprobs
from pdserve.scheduler.messages.frontend import Cancel, Failed, FinishReason, Prefilled, Submit, Tokens
from tests.server.http_harness import RunningServer, sse_events
from tests.server.scripted_leader import EOS, make_finished

PROMPTS: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "ab"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}]},
}
ROUTES = pytest.mark.parametrize("path", list(PROMPTS))


def post(server: RunningServer, path: str, **body: object) -> "asyncio.Task[httpx.Response]":
    return asyncio.create_task(server.http.post(path, json={**PROMPTS.get(path, {}), "rid": "r", **body}))


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


async def stop_early(server: RunningServer, data: bytes) -> None:
    """The output `data` completes a stop condition: the frontend stops the request."""
    await server.leader.send(Tokens("r", tuple(data)))
    assert await server.leader.expect(Cancel) == Cancel("r", stopped=True)
    await server.leader.send(make_finished("r", len(data), FinishReason("stop")))


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "data", "shown", "matched"),
    [
        ({"stop": "\n"}, b"one\n", "one", "\n"),
        ({"stop_regex": r"and|or"}, b"this and", "this ", "and|or"),
        ({"stop_regex": [r"[.!?]\s*$"], "stop": ["x"]}, b"One.", "One", r"[.!?]\s*$"),
        ({"stop_regex": r"\d+", "include_stop_str_in_output": True}, b"a 7", "a 7", r"\d+"),
    ],
)
async def test_matched_stop_condition(
    decode: RunningServer, path: str, stream: bool, stop: dict[str, object], data: bytes, shown: str, matched: str
) -> None:
    """As in SGLang's tests of `matched_stop`. vLLM's name for it is `stop_reason`."""
    asking = post(decode, path, stream=stream, **stop)
    await decode.leader.expect(Submit)
    await stop_early(decode, data)
    if stream:
        events: list[Any] = sse_events((await asking).text)
        choices = [event["choices"][0] for event in events[:-1]]
        text = "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
        assert [choice for choice in choices[:-1] if "matched_stop" in choice] == []
        last = choices[-1]
    else:
        last = (await asking).json()["choices"][0]
        text = text_of(last)
    assert (text, last["finish_reason"], last["matched_stop"], last["stop_reason"]) == (shown, "stop", matched, matched)


@ROUTES
@pytest.mark.parametrize(
    ("reason", "matched", "stop_reason"),
    [
        (FinishReason("stop", matched=EOS), EOS, None),
        (FinishReason("stop", matched=65), 65, 65),
        (FinishReason("length", length=1), None, None),
    ],
)
async def test_matched_token(
    decode: RunningServer, path: str, reason: FinishReason, matched: int | None, stop_reason: int | None
) -> None:
    asking = post(decode, path, stop_token_ids=[65])
    await decode.leader.expect(Submit)
    await decode.leader.send(Tokens("r", (matched or 66,)), make_finished("r", 1, reason))
    choice = (await asking).json()["choices"][0]
    assert (choice["finish_reason"], choice["matched_stop"]) == (reason.type, matched)
    assert choice["stop_reason"] == stop_reason


async def test_stop_regex_of_generate(decode: RunningServer) -> None:
    asking = post(decode, "/generate", text="a", sampling_params={"stop_regex": r"b+c"})
    await decode.leader.expect(Submit)
    await decode.leader.send(Tokens("r", tuple(b"ab")))
    await stop_early(decode, b"bc")
    result = (await asking).json()
    assert (result["text"], result["meta_info"]["finish_reason"]) == ("a", {"type": "stop", "matched": "b+c"})


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("(", 'stop_regex "(" is not a valid regular expression: missing ), unterminated subpattern at position 0'),
        ("(a{999}){999}", 'stop_regex "(a{999}){999}" is too large: with repetitions written out'),
        (r"(?=a)b", 'stop_regex "(?=a)b" has look-around, which is not supported'),
        ("a*", 'stop_regex "a*" matches the empty text'),
        (["a"] * 9, "stop_regex holds 9 items; at most 8 are allowed"),
        ("a" * 257, "stop_regex must have 1 to 256 characters, got 257"),
        ([".{150}a", ".{150}b"], "stop_regex is too large: it has 604 items in total; at most 512 are allowed"),
        (
            ["[\u0100-\uffff]", "[\u0101-\uffff]", "[\u0102-\uffff]", "[\u0103-\uffff]", "[\u0104-\uffff]"],
            "stop_regex is too large: it has 326385 characters in ranges of classes in total; at most 262144",
        ),
    ],
)
async def test_invalid_stop_regex_is_refused(decode: RunningServer, value: object, problem: str) -> None:
    answer = await decode.http.post("/v1/completions", json={"prompt": "a", "stop_regex": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop_regex")
    assert answer.json()["error"]["message"].startswith(problem)


async def test_stop_regexes_of_many_prompts_are_limited_together(decode: RunningServer) -> None:
    params = [{"stop_regex": "a{200}" + "b" * number} for number in range(1, 20)]
    answer = await decode.http.post("/generate", json={"text": ["a"] * len(params), "sampling_params": params})
    assert answer.json()["error"]["param"] == "sampling_params[5].stop_regex"
    assert "items in all prompts in total; at most 2048 are allowed" in answer.json()["error"]["message"]


async def test_different_stop_regexes_of_many_prompts_are_counted(decode: RunningServer) -> None:
    params = [{"stop_regex": [chr(0x4E00 + 8 * at + each) for each in range(8)]} for at in range(17)]
    answer = await decode.http.post("/generate", json={"text": ["a"] * len(params), "sampling_params": params})
    assert answer.json()["error"]["param"] == "sampling_params[16].stop_regex"
    assert "136 different expressions in all prompts in total; at most 128" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/generate", *PROMPTS])
@pytest.mark.parametrize("stream", [False, True])
async def test_aborted_request_returns_the_output_so_far(decode: RunningServer, path: str, stream: bool) -> None:
    """As in SGLang: status 200, and the finish reason is `abort`."""
    asking = post(decode, path, stream=stream, **({"text": "a"} if path == "/generate" else {}))
    await decode.leader.expect(Submit)
    await decode.leader.send(Tokens("r", tuple(b"AB")))
    await decode.report()
    assert (await decode.http.post("/abort_request", json={"rid": "r"})).json() == {"aborted": ["r"]}
    await decode.leader.expect(Cancel)
    await decode.leader.send(Failed("r", 499, "aborted", "the client aborted the request"))
    answer = await asking
    assert answer.status_code == 200
    last: Any = sse_events(answer.text)[-2] if stream else answer.json()
    assert "error" not in last
    if path == "/generate":
        assert last["text"] == "AB"
        assert last["meta_info"]["finish_reason"] == {"type": "abort", "message": "the client aborted the request"}
    else:
        choice = last["choices"][0]
        assert (choice["finish_reason"], choice["matched_stop"]) == ("abort", None)
        assert stream or text_of(choice) == "AB"


@ROUTES
async def test_token_ids_are_returned(decode: RunningServer, path: str) -> None:
    asking = post(decode, path, return_token_ids=True)
    prompt = list((await decode.leader.expect(Submit)).prompt_ids)
    ended = make_finished("r", 2, FinishReason("stop", matched=EOS))
    await decode.leader.send(Tokens("r", (65, EOS)), ended)
    reply = (await asking).json()
    assert reply["choices"][0]["token_ids"] == [65, EOS]
    assert (reply["choices"][0] if path == "/v1/completions" else reply)["prompt_token_ids"] == prompt


@ROUTES
async def test_streamed_token_ids_and_usage_add_up(decode: RunningServer, path: str) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    asking = post(decode, path, stream=True, return_token_ids=True, stream_options=options)
    prompt = list((await decode.leader.expect(Submit)).prompt_ids)
    for token in (65, 0xC3, 0xA9):  # a letter, and a character of two tokens
        await decode.leader.send(Tokens("r", (token,)))
        await decode.report()
    await decode.leader.send(Tokens("r", (EOS,)), make_finished("r", 4, FinishReason("stop", matched=EOS)))
    events: list[Any] = sse_events((await asking).text)
    *chunks, last, _done = events
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == [65, 0xC3, 0xA9, EOS]
    sent = [place["prompt_token_ids"] for place in (*chunks, *choices) if "prompt_token_ids" in place]
    assert sent == [prompt]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


@ROUTES
async def test_prompt_logprobs(decode: RunningServer, path: str) -> None:
    """In vLLM's format, together with log-probabilities of the output that have fewer alternatives."""
    wanted: dict[str, object] = {"logprobs": 0} if path == "/v1/completions" else {"logprobs": True}
    asking = post(decode, path, prompt_logprobs=2, **wanted)
    assert (await decode.leader.expect(Submit)).logprobs == LogprobParams(top=2, start=0)
    prompt = (TokenLogprob(97, None), TokenLogprob(98, -3.0, ((65, -0.5), (66, -1.5))))
    await decode.leader.send(Prefilled("r", 0, pack_logprobs(prompt)))
    await decode.leader.send(Tokens("r", (65,), (TokenLogprob(65, -0.5, ((65, -0.5), (66, -2.0))),)))
    await decode.leader.send(make_finished("r", 1))
    reply = (await asking).json()
    choice = reply["choices"][0]
    assert (choice if path == "/v1/completions" else reply)["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -3.0, "rank": None, "decoded_token": "b"},
            "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
            "66": {"logprob": -1.5, "rank": 2, "decoded_token": "B"},
        },
    ]
    if path == "/v1/completions":
        assert (choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"]) == (["A"], None)
    else:
        assert choice["logprobs"]["content"][0]["top_logprobs"] == []


async def test_prompt_logprobs_alone_return_none_for_the_output(decode: RunningServer) -> None:
    asking = post(decode, "/v1/completions", prompt_logprobs=0)
    assert (await decode.leader.expect(Submit)).logprobs == LogprobParams(top=0, start=0)
    await decode.leader.send(Prefilled("r", 0, pack_logprobs([TokenLogprob(97, None), TokenLogprob(98, -1.0)])))
    await decode.leader.send(Tokens("r", (65,), (TokenLogprob(65, -0.5),)), make_finished("r", 1))
    choice = (await asking).json()["choices"][0]
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -1.0, "rank": None, "decoded_token": "b"}}]
    refused = await decode.http.post("/v1/completions", json={"prompt": "a", "prompt_logprobs": 1, "stream": True})
    assert refused.json()["error"]["message"] == "prompt_logprobs is not available in a stream, got 1"
